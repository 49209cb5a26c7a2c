"""What a forward pass that backward repeats must not do twice: talk to other ranks, and count.

A layer does such a thing inside of :func:`once`. Where a block is computed again, it gets what came of it before, in
the same order::

    forward      once ─▶ 7    once ─▶ statistics           kept with the block until its backward
    again        once ◀─ 7    once ◀─ statistics           nothing is sent

Each thread has what it computes to itself: autograd repeats a block on the thread on which its backward runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from evener.errors import ConfigurationError

T = TypeVar("T")


class _Thread(threading.local):
    ask: Callable[[Callable[[], Any]], Any] | None = None


_now = _Thread()


def once(make: Callable[[], T]) -> T:
    """What ``make`` returns, or returned when the block that is computed again was computed first."""
    return make() if _now.ask is None else _now.ask(make)


class Segment:
    """One call of a block."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the call in the forward pass."""

        def ask(make: Callable[[], Any]) -> Any:
            self._kept.append(make())
            return self._kept[-1]

        with _asking(ask):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around each repetition, which may end early.

        Raises:
            ConfigurationError: If it asks for more than there was.
        """
        kept = iter(self._kept)

        def ask(make: Callable[[], Any]) -> Any:
            for value in kept:
                return value
            raise ConfigurationError(
                "a block goes another way when it is computed again than it did before, so that its gradients would be "
                "others: leave recompute out, or have its forward depend on its inputs and PyTorch's generator alone"
            )

        with _asking(ask):
            yield


def apart() -> AbstractContextManager[None]:
    """Around a pass that is no part of any call of a block, though one is under way: nothing of it is kept."""
    return _asking(None)


@contextmanager
def _asking(ask: Callable[[Callable[[], Any]], Any] | None) -> Iterator[None]:
    before, _now.ask = _now.ask, ask
    try:
        yield
    finally:
        _now.ask = before
