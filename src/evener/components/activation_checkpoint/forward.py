"""Activation checkpointing of single blocks: wraps a block's ``forward`` so that backward can compute it again.

::

    kept        forward ──────────────────── backward        holds all that backward needs
    again       forward ───────────── again, backward        holds its inputs

``torch.utils.checkpoint`` does the work and keeps random numbers and precision the same. This module adds two things:
a recomputation does not repeat the counting and communication of Evener's layers (:mod:`evener.nn.recompute_guard`),
and does not write into buffers again.

The block's ``forward`` is replaced and no wrapper module is added, so names, state and hooks stay. A recomputation does
not call the hooks of the block by which FSDP2 gathers weights; the weights are already gathered for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from evener.components.activation_checkpoint.written_buffers import Copies, WrittenBuffers, in_place_of
from evener.components.repeated_blocks import repeated_blocks
from evener.core.config.recompute import Recompute
from evener.errors import ConfigurationError
from evener.nn.fqn import clean_name
from evener.nn.recompute_guard import RecomputedCall
from evener.torch_internals.dispatch import active_fake_mode
from evener.torch_internals.modules import own_parameters

_PLAIN = (torch.Tensor, nn.Parameter)


class Watch(Protocol):
    """Observes the calls of blocks. While one is set, recomputations do not stop before the end of the block."""

    def called(self, name: str) -> Any:
        """Called after a block's forward. Returns an object for :meth:`again` and :meth:`returned`."""

    def again(self, call: Any) -> AbstractContextManager[Any]:
        """Returns a context that is entered around the recomputation."""

    def returned(self, call: Any, found: Any) -> None:
        """Called with the output ``found`` of the recomputation."""


class Recomputed:
    """Replaces the ``forward`` of a block."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.called = name, False
        self.kept = False
        """True if the block keeps its activations, so that backward does not compute it again."""
        self.watch: Watch | None = None
        self._block, self._inner = block, block.forward
        self._buffers = WrittenBuffers(name, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._block.training):
            return self._inner(*args, **kwargs)
        self.called = True
        if self.kept:
            return self._inner(*args, **kwargs)
        call = _Call(self._block, self._buffers, self.watch)
        early = nullcontext() if self.watch is None else set_checkpoint_early_stop(False)
        with early:
            compute = partial(self._compute, call, kwargs)
            found = checkpoint(compute, *args, use_reentrant=False, context_fn=call.contexts)
        if self.watch is not None:
            call.noted = self.watch.called(self.name)
        return found

    def _compute(self, call: _Call, kwargs: dict[str, Any], *args: Any) -> Any:
        found = self._inner(*args, **kwargs)
        if self.watch is not None and call.noted is not None:
            self.watch.returned(call.noted, found)
        return found

    def __reduce__(self) -> Any:
        """Supports copying the block: the copy has its own buffers' state and no ``watch``."""
        return _copied, (self.name, self._block, self._inner, self.kept)


def _copied(name: str, block: nn.Module, inner: Any, kept: bool) -> Recomputed:
    made = Recomputed(name, block)
    made._inner, made.kept = inner, kept
    return made


class _Call:
    """The state of one call of a block, kept until its backward."""

    def __init__(self, block: nn.Module, buffers: WrittenBuffers, watch: Watch | None) -> None:
        self._buffers, self._watch = buffers, watch
        self._weights: Weights = [
            (held, name, weight)
            for held in map(own_parameters, block.modules())
            for name, weight in held.items()
        ]
        self._segment, self._copies = RecomputedCall(), Copies()
        self.noted: Any = None

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns the contexts for ``checkpoint``: around the forward pass, and around each recomputation."""
        return self._first(), _Repeatedly(self._again)

    @contextmanager
    def _first(self) -> Iterator[None]:
        with self._segment.first(), self._buffers.first(self._copies):
            yield

    @contextmanager
    def _again(self) -> Iterator[None]:
        seen = nullcontext() if self._watch is None else self._watch.again(self.noted)
        with in_place_of(self._copies), _held_again(self._weights), self._segment.again(), seen:
            yield


Weights = list[tuple[dict[str, Any], str, Any]]
"""For each weight the dict of its module's weights, its key in it, and what was there."""


@contextmanager
def _held_again(weights: Weights) -> Iterator[None]:
    """Puts the weights of a call in the place of others, as those of the module are after ``functional_call``.

    It leaves those alone that FSDP2 divides, which are no plain tensors before they are gathered.
    """
    others = [
        (held, name, weight, held[name])
        for held, name, weight in weights
        if held.get(name) is not weight and type(weight) in _PLAIN and type(held.get(name)) in _PLAIN
    ]
    try:
        for held, name, weight, _ in others:
            held[name] = weight
        yield
    finally:
        for held, name, _, now in others:
            held[name] = now


class _Repeatedly:
    """A context that may be entered several times, for a backward in several parts. Calls ``make`` each time."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        made = self._make()
        made.__enter__()
        self._entered.append(made)

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)


class Blocks:
    """The blocks of a model that may use activation checkpointing."""

    def __init__(self, forwards: Iterable[Recomputed] = ()) -> None:
        self._forwards = {each.name: each for each in forwards}
        self._checked = not self._forwards

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks, in the order of the model."""
        return tuple(self._forwards)

    def keep(self, names: Collection[str]) -> None:
        """Lets the blocks of these ``names`` keep their activations; all others are computed again in backward."""
        for each in self._forwards.values():
            each.kept = each.name in names

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Lets ``watch`` observe all blocks during the ``with`` statement."""
        try:
            for each in self._forwards.values():
                each.watch = watch
            yield
        finally:
            for each in self._forwards.values():
                each.watch = None

    def check(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Checks once, after the first step, that a block was called. All ranks must call this together.

        Args:
            gather: Gathers the values of all ranks; a collective call.

        Raises:
            ConfigurationError: If no rank called any block, so that checkpointing has no effect.
        """
        if self._checked:
            return
        self._checked = True
        called = [each.name for each in self._forwards.values() if each.called]
        if not any(gather(called)):
            raise ConfigurationError(
                f"recompute: no rank has called {', '.join(self.names[:4])} in a step, so that nothing is computed "
                "again: what is around these blocks uses their parts, or a pipeline has cut them open, whose option "
                "blocks=NAME of their list keeps them whole. Else leave recompute out"
            )


def recompute_blocks(asked: Recompute | None, model: nn.Module) -> Blocks:
    """Replaces ``forward`` of the blocks that ``model`` repeats. Does nothing if ``asked`` is None.

    Raises:
        ConfigurationError: If the model has no repeated blocks, or a budget is used in a memory estimate, where blocks
            cannot be measured.
    """
    if asked is None:
        return Blocks()
    if asked.is_budget and active_fake_mode() is not None:
        raise ConfigurationError(
            f"which blocks recompute={asked.text} takes is measured in the run's first steps and not known before: "
            "estimate the least memory with recompute=blocks, and the most without"
        )
    made = []
    for name in repeated_blocks(model):
        block = model.get_submodule(name)
        block.forward = forward = Recomputed(clean_name(name), block)
        made.append(forward)
    if not made:
        raise ConfigurationError(
            "recompute computes modules again that a model repeats in an nn.ModuleList or nn.Sequential, and "
            f"{type(model).__name__} has no two of one class there that have modules inside: write its layers as such "
            "blocks, or leave recompute out"
        )
    return Blocks(made)
