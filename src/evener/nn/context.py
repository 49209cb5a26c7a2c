"""The current scope: tells layers which micro-batch is being computed.

Some layers depend on more than their input: BatchNorm on the other ranks, Dropout on which samples these are. They
cannot get this through ``forward``, whose signature belongs to the user. So the engine opens a scope around the
forward and backward of each micro-batch, and such layers call :func:`current`.

The scope is a plain global of the process. A ``ContextVar`` or a thread-local would not work: autograd runs
backward, and the forward passes that activation checkpointing repeats, on its own threads, which inherit neither.
If one process computes several parts of a batch at once, each part has a thread that also runs its backward. Each
of these threads sets a scope of its own (:func:`own_scope`), which takes precedence over that of the process.

Scopes may end in another order than they began. Two loops over loaders may take turns, and the scope of a loop that
ended with an error stays open as long as the exception is referenced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from evener.errors import ConfigurationError
from evener.nn.recompute_guard import apart, once
from evener.nn.sequence_layout import DividedSequence

_Found = TypeVar("_Found", bound="Scope | None")
GroupMaker = Callable[[], ProcessGroup | None]


def _no_group() -> None:
    """Returns None, for a rank that computes alone."""


@dataclass(eq=False)
class Scope:
    """One micro-batch during its forward and backward on this rank.

    Attributes:
        samples: (n,) int64, the global numbers of the samples of the micro-batch.
        step: The number of the training step.
        seed: The seed of the run.
        weight: 1, or 0 if the micro-batch is a placeholder: this rank has no samples and computes one only to take
            part in the collectives of the other ranks. A placeholder must not affect the result.
        group: Returns the process group of the ranks that compute this step, or None on a single device. All ranks
            must call it together.
        sequence: The division of the micro-batch's sequences over ranks; None if each rank has whole sequences.
    """

    samples: Tensor
    step: int
    seed: int
    weight: int = 1
    group: GroupMaker = _no_group
    sequence: DividedSequence | None = None
    keys: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    """Keys that :mod:`evener.nn.dropout` derived from ``samples``, cached for each device."""
    _order: dict[Hashable, int] = field(default_factory=dict, repr=False)
    _calls: dict[Hashable, int] = field(default_factory=dict, repr=False)
    _forward_calls: dict[Hashable, int] = field(default_factory=dict, repr=False)

    def call(self, caller: Hashable) -> int:
        """Counts a call of a layer, given by its name or itself; returns the number of earlier calls in this pass.

        A block that Evener itself recomputes gets the same numbers again.

        Raises:
            ConfigurationError: If backward repeats a layer that forward called more than once. Activation
                checkpointing repeats its segments in reverse order, so it is unknown which call this is.
        """
        return once(lambda: self._count(caller))

    def _count(self, caller: Hashable) -> int:
        if self._forward_calls.get(caller, 0) > 1:
            raise ConfigurationError(
                f"{caller} is called {self._forward_calls[caller]} times in one forward pass and again"
                " by activation checkpointing, which cannot tell these calls apart; give each its own"
                " evener.nn.Dropout"
            )
        number = self._calls.get(caller, 0)
        self._calls[caller] = number + 1
        return number

    def calls(self) -> dict[str, int]:
        """Returns how often each layer with a name was called so far in this pass."""
        return {caller: number for caller, number in self._calls.items() if isinstance(caller, str)}

    def follow(self, calls: dict[str, int]) -> None:
        """Continues a pass that began on another rank: takes over the call counts, from that rank's :meth:`calls`."""
        self._calls.update(calls)

    def order(self, caller: Hashable) -> int:
        """Returns a number for the layer: 0, 1, ... in the order of first requests in this scope."""
        return self._order.setdefault(caller, len(self._order))

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Context for a trial pass in the midst of a step: calls of layers inside do not count."""
        before = dict(self._order), dict(self._calls)
        try:
            with apart():
                yield
        finally:
            self._order, self._calls = before

    def rewind(self) -> None:
        """Restarts the call counts. Called between forward and backward, so that calls repeated in backward get the
        same numbers as in forward."""
        self._forward_calls, self._calls = self._calls, {}


_opened: list[resumed[Any]] = []
_current: Scope | None = None
"""The scope of the block opened last."""
_of_thread = threading.local()


def current() -> Scope | None:
    """Returns the scope of the micro-batch being computed, or None outside of Evener's training step."""
    own: Scope | None = getattr(_of_thread, "scope", None)
    return _current if own is None else own


def data_group() -> ProcessGroup | None:
    """Returns the process group that computes the current micro-batch, for a loss or layer that needs all of its parts.

    Returns None on a single device, and outside of Evener's training step and evaluation: this rank is alone then. All
    ranks must make the first call together, which creates the group. Evener uses it for nothing else.
    """
    scope = current()
    return None if scope is None else scope.group()


def divided() -> DividedSequence | None:
    """Returns how the sequences of the current micro-batch are divided over ranks, or None if each rank has whole
    sequences."""
    scope = current()
    return None if scope is None else scope.sequence


def without_placeholder(rows: Tensor) -> Tensor:
    """Returns ``rows`` (samples, ...) of the current micro-batch, or no rows if it is a placeholder.

    A rank without samples computes a placeholder sample that must not affect the result. Call this before rows of all
    ranks are brought together, so that they do not include placeholders.
    """
    scope = current()
    return rows[:0] if scope is not None and scope.weight == 0 else rows


def scope(
    samples: Tensor,
    step: int,
    seed: int,
    weight: int = 1,
    group: GroupMaker = _no_group,
    sequence: DividedSequence | None = None,
) -> resumed[Scope]:
    """Opens a new :class:`Scope` as the current one, in a ``with`` block; restores the previous one at the end."""
    return resumed(Scope(samples, step, seed, weight, group, sequence))


class resumed(Generic[_Found]):  # noqa: N801 # a context manager; one made of a generator costs four times as much
    """Context in which ``found`` is the current scope; the previous one is restored at the end.

    The same scope can be opened again, for a backward that runs later. Ending the block twice has no effect.
    """

    __slots__ = ("found",)

    def __init__(self, found: _Found) -> None:
        self.found = found

    def __enter__(self) -> _Found:
        global _current
        _opened.append(self)
        _current = self.found
        return self.found

    def __exit__(self, *_: object) -> None:
        global _current
        if self in _opened:
            _opened.remove(self)
        _current = _opened[-1].found if _opened else None


def outside() -> resumed[None]:
    """Context without a current scope, for running a model outside of training; the previous one is restored."""
    return resumed(None)


@contextmanager
def own_scope(scope: Scope) -> Iterator[Scope]:
    """Context in which ``scope`` is the current scope of this thread only. Other threads compute other parts of the
    micro-batch at the same time.

    Backward must stay on this thread (``torch.autograd.set_multithreading_enabled(False)``).
    """
    _of_thread.scope = scope
    try:
        yield scope
    finally:
        del _of_thread.scope
