"""Records the operations of a function on a device, to run them again without Python.

``RECORDERS`` has a recorder for each type of device that can. A device without one, such as a stand-in, can register
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

import torch

from evener.core.collector import collector_paused
from evener.torch_internals.cuda_graphs import end_failed_recording

_Result = TypeVar("_Result")


class Recording(Protocol):
    """The recorded operations. They read and write the same memory in each replay."""

    def replay(self) -> None:
        """Runs the operations again, behind all that is queued."""


class Recorder(Protocol):
    """Records on one device."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Context for a pass before those that are recorded, which lets libraries allocate and choose what they keep
        for later calls."""

    def record(self, function: Callable[[], _Result]) -> tuple[_Result, Recording]:
        """Records ``function``. Returns its result, whose tensors each replay overwrites, and the recording."""


class CudaRecorder:
    """Records CUDA graphs, on a stream of its own.

    All graphs share one private memory pool, so that they need no more memory than the largest. Then a replay may
    overwrite the results of another graph's, and whoever needs these for longer must copy them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield
        before.wait_stream(self._stream)

    def record(self, function: Callable[[], _Result]) -> tuple[_Result, Recording]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls may not wait: others copy batches and watch collectives meanwhile. What is
            # collected, such as an older graph or an event, may call the device in a way that ends the recording.
            with (
                collector_paused(),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                found = function()
        except BaseException:
            end_failed_recording(self._device, self._pool)
            raise
        return found, graph


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""Recorder by device type."""
