"""What a proof sets and sees within a loop of the user's own.

``evener.prepare`` and what goes with it ask the watch of the process. Usually that is one that does nothing; a proof
puts its own in the place for as long as it runs a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from evener.distributed.environment import Environment


class LoopWatch:
    """Changes nothing, and remembers nothing; a watch overrides what it wants to set or to know."""

    environment: Environment | None = None
    """The place of this process in place of that which its variables say."""

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """The settings of a call of ``evener.prepare``, from those that the loop gave."""
        return given

    def opened(self, close: Callable[[], None]) -> None:
        """A preparation was begun, which ``close`` ends."""

    def prepared(self, kind: str, given: Any, made: Any) -> Any:
        """What the loop gets for a ``model``, ``loader``, ``loss``, ``optimizer`` or ``scheduler``.

        Args:
            given: What the loop gave.
            made: What it would get without a watch.
        """
        return made

    def batch(self, mark: float) -> None:
        """The loop gets a batch; ``mark`` tells its samples from those of others, by whatever ranks it is divided."""

    def mean(self, value: Tensor) -> None:
        """``evener.global_mean`` returns ``value``."""


class _Current:
    """The watch of this process."""

    watch = LoopWatch()


def loop_watch() -> LoopWatch:
    """The watch of this process."""
    return _Current.watch


@contextmanager
def watching(watch: LoopWatch) -> Iterator[None]:
    """``watch`` is that of this process inside."""
    before, _Current.watch = _Current.watch, watch
    try:
        yield
    finally:
        _Current.watch = before
