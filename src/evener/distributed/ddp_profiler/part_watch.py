"""Notes the parts of a step by wrapping functions, without changing what they do.

An error in what is called beside a function is kept, and ends the observation; the function is called as before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from evener.core.text import said
from evener.distributed.ddp_profiler.timeline import BACKWARD, EXCHANGE, FORWARD, UPDATE, clock_of


class PartWatch:
    """The parts of the current step.

    Args:
        device: The device whose clock it uses at first.
    """

    def __init__(self, device: torch.device) -> None:
        self.failure = ""
        """The first error; empty if there was none."""
        self.clock = clock_of(device)
        self._open, self._thread = [FORWARD], threading.get_ident()
        """The current part and those around it."""
        self.begin()

    def begin(self) -> None:
        """Begins a step, in the current part."""
        self.marks: list[Any] = [self._open[-1], self.clock.mark()]
        """Each part with the mark of its begin; see `part_seconds`."""

    @property
    def part(self) -> int:
        """The current part."""
        return self._open[-1]

    def fail(self, error: Exception) -> None:
        """Ends the observation because of an error, unless it has ended."""
        self.failure = self.failure or f"{type(error).__name__}: {said(error)}"

    def safely(self, act: Callable[..., None]) -> Callable[..., None]:
        """Returns ``act`` without its errors, of which the first ends the profiling."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            if not self.failure:
                try:
                    act(*args, **kwargs)
                except Exception as error:
                    self.fail(error)

        return guarded

    def wrap(
        self,
        stack: ExitStack,
        owner: Any,
        name: str,
        part: int | None,
        before: Callable[[Any, Any], None] = lambda args, kwargs: None,
        after: Callable[[Any, Any], None] = lambda result, args: None,
    ) -> None:
        """Replaces ``owner.name(...)`` by a function that notes its time as a part of the step.

        Args:
            part: The part; None if its time is not noted.
            before: Called with the arguments. For the parts of collectives, also if the part does not begin.
            after: Called with the result and the positional arguments.
        """
        original, leave = getattr(owner, name), self.safely(self.leave)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.failure:
                return original(*args, **kwargs)
            entering = False
            try:
                enters = part is not None and self.may_enter(part)
                if enters or (part == EXCHANGE and self.part != EXCHANGE):  # some call others
                    before(args, kwargs)
                if enters:
                    self.enter(part)
                    entering = True
            except Exception as error:
                self.fail(error)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                if entering:
                    leave()
                raise
            try:
                if entering or part is None:
                    after(result, args)
                if entering:
                    self.leave()
            except Exception as error:
                self.fail(error)
            return result

        stack.enter_context(replaced(owner, name, wrapped))

    def may_enter(self, part: int) -> bool:
        """Returns True if a part begins: not within itself, nor within a wait, nor in a thread beside the training.

        On a GPU autograd runs backward in a thread of its own, while the thread of the script waits.
        """
        inner = self._open[-1]
        of_training = inner == BACKWARD or threading.get_ident() == self._thread
        return of_training and inner in (FORWARD, BACKWARD, UPDATE) and part not in self._open[1:]

    def enter(self, part: int | None) -> None:
        """Begins a part within the current one."""
        self._open.append(part)  # type: ignore[arg-type]
        self.marks += (part, self.clock.mark())

    def leave(self) -> None:
        """Ends the current part."""
        self._open.pop()
        self.marks += (self._open[-1], self.clock.mark())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute in the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
