"""Hooks with which ``evener verify`` controls and observes a training loop of the user.

``evener.prepare`` and related functions call the current watch of the process. By default that is a watch which does
nothing. ``evener verify`` installs its own while it runs a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from evener.distributed.environment import Environment


class LoopWatch:
    """The default watch, which does nothing. Subclasses override the hooks that they need."""

    environment: Environment | None = None
    """Replaces the environment that would be detected from the process's variables; None to keep it."""

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings for a call of ``evener.prepare``, given those that the loop passed."""
        return given

    def opened(self, close: Callable[[], None]) -> None:
        """Called when a call of ``evener.prepare`` begins; ``close`` ends what it prepares."""

    def prepared(self, kind: str, given: Any, made: Any) -> Any:
        """Returns the object that the loop gets from ``evener.prepare``.

        Args:
            kind: ``model``, ``loader``, ``loss``, ``optimizer`` or ``scheduler``.
            given: The object that the loop passed.
            made: The object that the loop would get without a watch.
        """
        return made

    def batch(self, mark: Callable[[], float]) -> None:
        """Called when the loop gets a batch. ``mark`` returns a number for the batch's samples, however ranks divide
        them."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Called when an optimizer has stepped, while a preparation lasts."""

    def mean(self, value: Tensor) -> None:
        """Called when ``evener.global_mean`` returns ``value``."""


class _CurrentWatch:
    """Holds the current watch of this process."""

    watch = LoopWatch()


def loop_watch() -> LoopWatch:
    """Returns the current watch of this process."""
    return _CurrentWatch.watch


@contextmanager
def watching(watch: LoopWatch) -> Iterator[None]:
    """Makes ``watch`` the current watch of this process within the block."""
    before, _CurrentWatch.watch = _CurrentWatch.watch, watch
    try:
        yield
    finally:
        _CurrentWatch.watch = before
