"""Copies that overlap with computation. The device waits for them, and the host never does.

::

    computing   ── forward ────── forward ──────── forward ──         a copy begins after what was queued before it
    beside        └─ out a ─┘    └─ out b ─┘                          the memory of a is free when computing has
                                             ▲                        passed the mark behind its copy
                                             wait(mark of a)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Beside(Protocol):
    """A queue of copies beside the queue of computation."""

    def lane(self) -> AbstractContextManager[Any]:
        """Context for copies: they begin after everything that was queued before the block, and overlap with later
        computation."""

    def mark(self) -> Any:
        """Returns a mark behind all copies queued so far."""

    def wait(self, mark: Any) -> None:
        """Makes computation that is queued from now on wait until the copies before the mark are done."""


class AtOnce:
    """Copies at once, on devices where a copy is finished when the call returns."""

    def lane(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        """Does nothing, because all copies are finished."""


class OnStream:
    """Copies on a separate CUDA stream. Copies in both directions share the stream, so that a returned buffer can be
    overwritten at once: copies that read it were queued earlier."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def lane(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)
