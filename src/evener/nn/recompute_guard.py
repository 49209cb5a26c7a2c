"""Guards actions that a forward pass must not do again when backward recomputes it: communicating and counting.

A layer calls such an action through :func:`once`. When a block is recomputed, :func:`once` returns the results of the
first computation, in the same order::

    forward      once ─▶ 7    once ─▶ statistics           kept with the block until its backward
    again        once ◀─ 7    once ◀─ statistics           nothing is sent

The state is thread-local: autograd recomputes a block on the thread that runs its backward.
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
    """Calls ``make`` and returns its result. If a block is being recomputed, returns the result of the first time."""
    return make() if _now.ask is None else _now.ask(make)


class RecomputedCall:
    """One call of a recomputed block: keeps the results of :func:`once`."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context for the call in the forward pass: records results."""

        def ask(make: Callable[[], Any]) -> Any:
            self._kept.append(make())
            return self._kept[-1]

        with _asking(ask):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context for each recomputation, which may stop early: returns the recorded results.

        Raises:
            ConfigurationError: If the recomputation asks for more results than were recorded.
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
    """Context for a pass that does not belong to the block being computed: its results are not recorded."""
    return _asking(None)


@contextmanager
def _asking(ask: Callable[[Callable[[], Any]], Any] | None) -> Iterator[None]:
    before, _now.ask = _now.ask, ask
    try:
        yield
    finally:
        _now.ask = before
