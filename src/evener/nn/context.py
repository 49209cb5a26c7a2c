"""What is being computed now, for the layers that must know it.

A layer whose result depends on more than its input (BatchNorm: on the other ranks; Dropout: on which samples
these are) cannot be told through ``forward``, whose signature is the user's. The engine therefore opens a
scope around the forward and backward of each micro-batch, and such layers ask :func:`current`.

The scope is a plain global of the process, not a ``ContextVar`` and not thread-local: autograd runs backward,
and with it the forward passes that activation checkpointing repeats, on threads of its own, which inherit
neither. Where one process computes several parts of a batch at once, a thread each that keeps backward to itself,
each of these threads has a scope of its own (:func:`own_scope`), which it sees before that of the process.

Scopes may end in another order than they began: loops over two loaders at once take turns, and that of a loop that an
error ended lives on as long as the error is kept.
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
    """Of a rank alone."""


@dataclass(eq=False)
class Scope:
    """One micro-batch on its way forward and backward on this rank.

    Attributes:
        samples: (n,) int64, the global numbers of the samples of the micro-batch.
        step: The number of the training step.
        seed: The seed of the run.
        weight: 0 if the micro-batch is a placeholder, computed only so that this rank joins the collectives
            of the others, that must count for nothing; else 1.
        group: Gives the ranks that compute this step's other parts, None on a single device. They call it together.
        sequence: How the sequences of the micro-batch are divided over ranks; None where each is whole.
    """

    samples: Tensor
    step: int
    seed: int
    weight: int = 1
    group: GroupMaker = _no_group
    sequence: DividedSequence | None = None
    keys: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    """What :mod:`evener.nn.dropout` derived from ``samples``, once a device."""
    _order: dict[Hashable, int] = field(default_factory=dict, repr=False)
    _calls: dict[Hashable, int] = field(default_factory=dict, repr=False)
    _forward_calls: dict[Hashable, int] = field(default_factory=dict, repr=False)

    def call(self, caller: Hashable) -> int:
        """How often the layer, given by its name or itself, was called before in this pass.

        A block that Evener itself computes again gets the numbers that it had.

        Raises:
            ConfigurationError: If backward repeats a layer that forward called more than once: activation
                checkpointing repeats the calls in reverse order of its segments, so there is no telling which
                one this is.
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
        """How often each layer that has a name was called so far."""
        return {caller: number for caller, number in self._calls.items() if isinstance(caller, str)}

    def follow(self, calls: dict[str, int]) -> None:
        """Goes on from where the same pass was on another rank, by its :meth:`calls`."""
        self._calls.update(calls)

    def order(self, caller: Hashable) -> int:
        """The place of the layer among those that asked, by their first time in this scope."""
        return self._order.setdefault(caller, len(self._order))

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Around a pass beside that of the step: the calls of layers in it do not count."""
        before = dict(self._order), dict(self._calls)
        try:
            with apart():
                yield
        finally:
            self._order, self._calls = before

    def rewind(self) -> None:
        """Called where forward ends and backward starts: calls repeated there get the numbers that they
        had.
        """
        self._forward_calls, self._calls = self._calls, {}


_opened: list[resumed[Any]] = []
_current: Scope | None = None
"""That of the block opened last."""
_of_thread = threading.local()


def current() -> Scope | None:
    """The scope of the micro-batch being computed in this process; None outside of Evener's training step."""
    own: Scope | None = getattr(_of_thread, "scope", None)
    return _current if own is None else own


def data_group() -> ProcessGroup | None:
    """The ranks that compute the other parts of the micro-batch at hand, for a loss or a layer that looks at all of it.

    None on a single device, and outside of Evener's training step and evaluation: this rank is alone then. The group is
    made with the first call, which all of its ranks make together, and serves nothing else.
    """
    scope = current()
    return None if scope is None else scope.group()


def divided() -> DividedSequence | None:
    """How the sequences of the micro-batch at hand are divided over ranks; None where each is whole."""
    scope = current()
    return None if scope is None else scope.sequence


def without_placeholder(rows: Tensor) -> Tensor:
    """``rows`` (samples, ...) of the micro-batch at hand, or none of them if it is a placeholder.

    A rank without samples computes a sample that counts for nothing. This keeps it away from the other ranks' samples.
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
    """Makes a new :class:`Scope` the current one, and the one before it again at the end."""
    return resumed(Scope(samples, step, seed, weight, group, sequence))


class resumed(Generic[_Found]):  # noqa: N801 # a block; a generator's would cost each step four times as much
    """Makes ``found`` the current scope, again where its backward comes later, and the one before it at the end.

    To end it twice changes nothing.
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
    """No scope is the current one, for a model that is run beside of training; the one before it again at the end."""
    return resumed(None)


@contextmanager
def own_scope(scope: Scope) -> Iterator[Scope]:
    """Makes ``scope`` that of this thread alone, which computes a part of the micro-batch while others compute theirs.

    Backward must stay on this thread (``torch.autograd.set_multithreading_enabled(False)``).
    """
    _of_thread.scope = scope
    try:
        yield scope
    finally:
        del _of_thread.scope
