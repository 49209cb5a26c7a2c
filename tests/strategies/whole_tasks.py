"""Optimizers that look at whole weights, and tasks for them: a weight of two names, one without gradient, a frozen
one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task

WORDS, WIDTH, SAMPLES = 7, 6, 31


class Shampoo(torch.optim.Optimizer):
    """Gupta and others, ICML 2018, with a count of steps that is the group's, state in a list and numbers as state."""

    def __init__(self, parameters: Any, lr: float = 0.05, weight_decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(self._direction(p, p.grad), alpha=group["lr"] / group["steps"] ** 0.5)

    def _direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["seen"], state["sides"] = 0, [1e-3 * torch.eye(n).to(p) for n in gradient.shape]
            state["mean"] = torch.zeros_like(p)
        state["seen"] += 1
        state["mean"].mul_(0.9).add_(gradient, alpha=0.1 + 0.01 / state["seen"])
        found = state["mean"]
        for dim, side in enumerate(state["sides"]):
            flat = gradient.movedim(dim, 0).flatten(1) if gradient.ndim > 1 else gradient[:, None]
            side.add_(flat @ flat.T)
            values, vectors = torch.linalg.eigh(side)
            root = vectors @ torch.diag(values.clamp(min=1e-12) ** (-0.5 / gradient.ndim)) @ vectors.T
            found = torch.tensordot(root, found, dims=([1], [dim])).movedim(0, dim)
        return found


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers in one, as users have them: Muon for matrices, AdamW for the rest, each with its own state."""

    def __init__(self, parameters: Any) -> None:
        held = list(parameters)
        super().__init__(held, {"lr": 0.03})
        self.parts = [
            torch.optim.Muon([p for p in held if p.ndim == 2], lr=0.03),
            torch.optim.AdamW([p for p in held if p.ndim != 2], lr=0.03),
        ]
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state.clear()
        for part in self.parts:
            self.state.update(part.state)

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()
        self._join()

    def load_state_dict(self, state_dict: Any) -> None:
        first, second = state_dict["param_groups"]
        for part, group in zip(self.parts, (first, second), strict=True):
            state = {n: state_dict["state"][n] for n in group["params"] if n in state_dict["state"]}
            part.load_state_dict({"state": state, "param_groups": [group]})
        self._join()


class Model(nn.Module):
    """Matrices of several shapes, of which ranks that hold a row or less have nothing; tied ends; a branch that the
    samples never take; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.few = nn.Linear(WIDTH, 2, bias=False)
        self.back = nn.Linear(2, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.never, self.fixed = nn.Linear(3, 3), nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words).mean(1)
        hidden = hidden + self.down(torch.tanh(self.up(hidden))) + self.back(self.few(hidden))
        scores: Tensor = self.head(self.fixed(hidden))
        return scores


class Matrices(nn.Module):
    """Has nothing but matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9, bias=False), nn.Linear(9, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 9, bias=False)
        self.head, self.never = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words).mean(1)
        scores: Tensor = self.head(hidden + self.down(torch.tanh(self.up(hidden)) * self.gate(hidden)))
        return scores


def task(optimizer: Any, model: Any = Model, **parts: Any) -> Task:
    words = torch.randint(WORDS, (SAMPLES, 4), generator=torch.Generator().manual_seed(2))
    data = TensorDataset(words, words.sum(1) % WORDS)
    usual: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": optimizer,
        "train": data,
        "evaluate": data,
        "batch_size": 8,
        "epochs": 9,
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "scheduler_interval": "step",
    }
    return Task(**(usual | parts))


def muon() -> Task:
    return task(lambda p: torch.optim.Muon(p, lr=0.03), Matrices)


def adafactor() -> Task:
    return task(lambda p: torch.optim.Adafactor(p, lr=0.05))


def shampoo() -> Task:
    return task(Shampoo, average=evener.ema(0.7))


def lying() -> Task:
    """Says that it looks at elements alone."""

    class Elementwise(Shampoo):
        elementwise = True

    return task(Elementwise)


def of_all() -> Task:
    """Looks at the norm of all gradients."""

    class OfAll(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            norm = sum(p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None)
            for group in self.param_groups:
                group["lr"] = 0.1 / float(norm)
            super().step()

    return task(lambda p: OfAll(p, lr=0.1))


def reading() -> Task:
    """Reads numbers of the weights when it is built."""

    class Reading(Shampoo):
        def __init__(self, parameters: Any) -> None:
            super().__init__(list(parameters), lr=abs(float(parameters[0].sum())) + 0.1)

    return task(Reading)


def towers() -> nn.Module:
    """Many matrices of about the same cost, and an embedding."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(24, 24, bias=False), nn.Tanh())]
    return nn.Sequential(nn.EmbeddingBag(WORDS, 24), *layers, nn.Linear(24, WORDS, bias=False))


def mixed_by_group() -> Task:
    """Says that AdamW's parameters may be cut."""

    class ByGroup(MuonAndAdamW):
        def elementwise(self, group: dict[str, Any]) -> bool:
            return "betas" in group

    return task(ByGroup)


def wide_muon() -> Task:
    return task(lambda p: torch.optim.Muon(p, lr=0.01), towers)


def wide_shampoo() -> Task:
    return task(Shampoo, towers)


def mixed() -> Task:
    return task(MuonAndAdamW)
