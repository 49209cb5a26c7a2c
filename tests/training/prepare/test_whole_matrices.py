"""Optimizers that look at whole weights, in loops of one's own whose weights or updates are divided."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import evener
from evener.data.batch import map_leaves
from evener.errors import EvenerError
from tests.strategies.whole_tasks import Model, MuonAndAdamW, Shampoo, task
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed
from tests.training.prepare.running import Weights, prepared
from tests.training.prepare.test_strategies import TENSOR, ZERO1, ZERO2, ZERO3, check

DIVISIONS = {"zero1": ZERO1, "zero2": ZERO2, "zero3": ZERO3, "tensor": TENSOR}


class Prodigious(torch.optim.SGD):
    """Its rate is of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()  # type: ignore[union-attr]
        for p in held:
            p.sub_(p.grad, alpha=0.1 / float(norm))  # type: ignore[arg-type]


class WithRoom(Shampoo):
    """Makes state for the parameters that it is given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] |= {
                    "seen": 0,
                    "sides": [torch.eye(n).to(p) for n in p.shape],
                    "mean": torch.zeros_like(p),
                }


def muon_beside_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == each] for each in (True, False))
    return [torch.optim.Muon(matrices, lr=0.03), torch.optim.AdamW(others, lr=0.03)]


MADE: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "muon": muon_beside_adamw,
    "shampoo": lambda model: [Shampoo(model.parameters())],
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.1)],
    "two in one": lambda model: [MuonAndAdamW(model.parameters())],
    "with room": lambda model: [WithRoom(model.parameters())],
}


class Loop:
    """A loop over sentences, with its optimizers."""

    def __init__(self, is_prepared: bool, make: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> None:
        torch.manual_seed(3)
        self.model: Any = Model().double()
        self.optimizers = make(self.model)
        self.loader: Any = DataLoader(task(torch.optim.SGD).train, batch_size=8)
        self.loss: Any = F.cross_entropy
        if is_prepared:
            found = evener.prepare(self.model, self.loader, self.loss, *self.optimizers)
            self.model, self.loader, self.loss, *self.optimizers = found

    def epoch(self) -> None:
        for words, targets in self.loader:
            self.model.zero_grad()
            self.loss(self.model(words), targets).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            for optimizer in self.optimizers:
                optimizer.step()

    def found(self) -> Weights:
        """Weights and state as one device has them."""
        values: list[Tensor] = []
        for optimizer in self.optimizers:
            state = optimizer.state_dict()["state"]
            map_leaves(
                lambda each: values.append(torch.as_tensor(each)), [state[key] for key in sorted(state)]
            )
        named = {f"state {number}": each for number, each in enumerate(values)}
        return copy.deepcopy(self.model.state_dict() | named)


def trained(is_prepared: bool, name: str) -> Weights:
    loop = Loop(is_prepared, MADE[name])
    loop.epoch()
    loop.epoch()
    return loop.found()


@pytest.mark.parametrize(
    ("name", "division"), crossed(MADE, list(DIVISIONS), lambda _: (ALWAYS, SLOW, ALWAYS, NIGHTLY))
)
def test_it_is_the_loop_of_one_device(ranks: Any, name: str, division: str) -> None:
    expected = trained(False, name)
    for found in ranks(2).run(prepared, trained, name, **DIVISIONS[division]):
        check(found, expected)


@pytest.mark.parametrize(
    ("mesh", "world_size"), [("data=2,shard=2", 4), ("data=2,tensor=2", 4), ("shard=3", 3)]
)
@pytest.mark.parametrize("name", ["shampoo", "muon"])
@pytest.mark.slow
def test_meshes_have_owners_too(ranks: Any, name: str, mesh: str, world_size: int) -> None:
    expected = trained(False, name)
    strategy = "tensor" if "tensor" in mesh else "sharded"
    for found in ranks(world_size).run(prepared, trained, name, strategy=strategy, mesh=mesh):
        check(found, expected)


def resumed(is_prepared: bool, name: str, file: Path) -> Weights:
    """The second of two epochs, after a file of the first."""
    loop = Loop(is_prepared, MADE[name])
    if file.exists():
        state = torch.load(file)
        loop.model.load_state_dict(state["model"])
        for optimizer, each in zip(loop.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        loop.epoch()
        return loop.found()
    loop.epoch()
    state = {"model": loop.model.state_dict(), "optimizers": [each.state_dict() for each in loop.optimizers]}
    if not is_prepared or evener.is_main():
        torch.save(state, file)
    return {}


@pytest.mark.parametrize(
    ("name", "ways"),
    crossed(
        ["muon", "shampoo", "two in one"],
        [("zero1", "tensor"), ("zero3", "zero1"), ("tensor", None), (None, "zero3"), ("zero1", "zero1")],
        lambda _: (ALWAYS, NIGHTLY),
    ),
)
def test_state_goes_from_strategy_to_strategy(
    ranks: Any, tmp_path: Path, name: str, ways: tuple[str | None, str | None]
) -> None:
    file, expected = tmp_path / "state.pt", trained(False, name)
    for division in ways:
        if division is None:
            found = [resumed(False, name, file)]
        else:
            found = ranks(2).run(prepared, resumed, name, file, **DIVISIONS[division])
    for each in found:
        check(each, expected)


def stepped_before(is_prepared: bool, later: bool = False) -> Weights:
    """The optimizer has state of the undivided model, or is made of the divided one."""
    torch.manual_seed(3)
    model: Any = Model().double()
    loader: Any = DataLoader(task(torch.optim.SGD).train, batch_size=8)
    loss: Any = F.cross_entropy
    optimizer: torch.optim.Optimizer = Shampoo(model.parameters())
    if not later:
        words, targets = next(iter(loader))
        loss(model(words), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_prepared:
        model, loader, loss = evener.prepare(model, loader, loss)
        if not later:
            optimizer = evener.prepare(optimizer)
    if later:
        optimizer = Shampoo(model.parameters())
    for words, targets in loader:
        loss(model(words), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    values: list[Tensor] = []
    state = optimizer.state_dict()["state"]
    map_leaves(lambda each: values.append(torch.as_tensor(each)), [state[key] for key in sorted(state)])
    return copy.deepcopy(model.state_dict() | {f"state {n}": each for n, each in enumerate(values)})


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("later", [False, True])
def test_optimizers_with_state_and_later_ones(ranks: Any, division: str, later: bool) -> None:
    expected = stepped_before(False, later)
    for found in ranks(2).run(prepared, stepped_before, later, **DIVISIONS[division]):
        check(found, expected)


class Failing(Shampoo):
    """Its first step fails before it has changed anything."""

    fails = True

    def step(self, closure: Any = None) -> None:
        if self.fails:
            self.fails = False
            raise ArithmeticError
        super().step()


def after_a_failed_step(is_prepared: bool) -> Weights:
    loop = Loop(is_prepared, lambda model: [Failing(model.parameters())])
    words, targets = next(iter(loop.loader))
    loop.loss(loop.model(words), targets).backward()
    with pytest.raises(ArithmeticError):
        loop.optimizers[0].step()
    loop.model.zero_grad()
    loop.epoch()
    return loop.found()


@pytest.mark.parametrize("division", ["zero1", "tensor"])
def test_a_step_may_fail_and_be_tried_again(ranks: Any, division: str) -> None:
    expected = after_a_failed_step(False)
    for found in ranks(2).run(prepared, after_a_failed_step, **DIVISIONS[division]):
        check(found, expected)


def of_two(_: bool) -> None:
    loop = Loop(
        True, lambda model: [torch.optim.SGD(model.parameters(), lr=0.1), Shampoo(model.parameters())]
    )
    loop.epoch()


def across(_: bool) -> None:
    Loop(True, lambda model: [Prodigious(model.parameters(), lr=0.1)]).epoch()


def room_made_later(_: bool) -> None:
    loop = Loop(True, lambda model: [])
    loop.optimizers = [WithRoom(loop.model.parameters())]
    loop.epoch()


def refused(name: str, division: str) -> str:
    loops = {"of two": of_two, "across": across, "room": room_made_later}
    try:
        prepared(loops[name], **DIVISIONS[division])
    except EvenerError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("name", "divisions", "words"),
    [
        ("of two", ("zero1", "zero3"), "as a whole, and SGD in parts: give each weight to one optimizer"),
        ("across", ("zero1", "zero3", "tensor"), "Prodigious looks at several weights at once"),
        ("room", ("tensor", "zero3"), "has state that it made for this rank's parts"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    ranks: Any, name: str, divisions: tuple[str, ...], words: str
) -> None:
    for division in divisions:
        for said in ranks(2).run(refused, name, division):
            assert words in said
