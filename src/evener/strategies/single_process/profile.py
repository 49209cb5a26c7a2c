"""Profiles the modules of a model in one forward pass: the order of calls, the time, and the memory kept for
backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from evener.components.model_trial import buffers_kept
from evener.data.batch import tensors_in


@dataclass
class Seen:
    """The profile of one module with all its submodules."""

    order: int
    """The position of the module's first call among those of all modules."""
    seconds: float = 0.0
    """Seconds of its forward passes."""
    inputs: int = 0
    """Bytes of the tensors of its first call."""
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes kept for backward, by the address of the storage."""

    @property
    def saved_nbytes(self) -> int:
        return sum(self.saved.values())


class Profiler:
    """Hooks that record the calls of every module of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Seen] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._running: list[tuple[str, float]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        if name not in self.seen:
            self.seen[name] = Seen(len(self.seen), inputs=_nbytes((args, kwargs)))
        self._running.append((name, time.perf_counter()))

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        name, began = self._running.pop()
        self.seen[name].seconds += time.perf_counter() - began

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            for name, _ in self._running:
                self.seen[name].saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output saved by its own operation would be a reference cycle


def _nbytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def profile(model: nn.Module, run: Callable[[], Any]) -> dict[str, Seen]:
    """Returns the profile of each module that ``run`` calls, by name. Restores buffers and random number generators of
    the CPU.

    Args:
        run: Runs one forward pass.
    """
    profiler = Profiler(model)
    with ExitStack() as undo:
        for module in model.modules():
            undo.callback(module.register_forward_pre_hook(profiler.enter, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(profiler.leave).remove)
        undo.enter_context(buffers_kept(model))
        undo.enter_context(torch.random.fork_rng(devices=[]))
        undo.enter_context(saved_tensors_hooks(profiler.keep, lambda tensor: tensor))
        kept = run()  # kept alive: a storage's address must not be reused
        del kept
    return profiler.seen
