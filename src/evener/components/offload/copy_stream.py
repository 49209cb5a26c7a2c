"""Copies that travel beside the computing, and what waits for them: the device, and never the host.

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
    """A lane beside the computing."""

    def lane(self) -> AbstractContextManager[Any]:
        """What is queued in the block runs beside, after all that was queued before the block."""

    def mark(self) -> Any:
        """Behind all that was queued beside so far."""

    def wait(self, mark: Any) -> None:
        """What is queued from now on begins after the mark was passed."""


class AtOnce:
    """The stand-in for devices whose copies are done when the call returns."""

    def lane(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        """Nothing is on its way."""


class OnStream:
    """A CUDA stream of its own. Copies out and back share it, so that a room that is given back may be written again at
    once: what reads it is queued before."""

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
