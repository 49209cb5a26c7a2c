"""A thread for each device of a process, and communication between these threads.

Each thread uses one device; threads of logical CPU devices divide the cores. A thread runs backward itself, not in
autograd's own threads. So a layer can wait for the other devices in backward too, and the thread identifies the device
that is computing.

::

    the process     jobs ────────────────────────────────────── all done, or the first error
    cpu:0           └─ forward ─ ● ─ forward ─ backward ─ ● ─┘
    cpu:1           └─ forward ─ ● ─ forward ─ backward ─ ● ─┘        ● the same BatchNorm on both: they wait

An error on one device ends the waits of the others. It is raised by the call that started the jobs, with a note that
names the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from evener.errors import RankTimeoutError, TaskError
from evener.hardware import accelerators
from evener.hardware.timers import Stopwatch
from evener.nn.batch_norm_peers import Later, Peers
from evener.strategies.single_process.devices import Devices

T = TypeVar("T")

_GLANCE_SECONDS = 0.5
"""Maximum delay of the reaction to Ctrl-C."""


class PeerThreadError(Exception):
    """Raised in a thread that waits for a device which has failed. That device raises its own error."""


class DeviceThreads:
    """One thread for each of ``devices``. They start at once and end with :meth:`close`."""

    def __init__(self, devices: Devices) -> None:
        self._devices, cores = devices, torch.get_num_threads()
        on_cpu = sum(device.type == "cpu" for device in devices)
        own = max(1, cores // max(1, on_cpu))
        self._pools = [
            ThreadPoolExecutor(1, f"evener {device}", partial(_settle, device, place, own))
            for place, device in enumerate(devices)
        ]
        self.run(dict.fromkeys(range(len(devices)), _nothing), _nothing)
        torch.set_num_threads(cores)  # the threads have changed the process's number

    def run(
        self,
        jobs: Mapping[int, Callable[[], T]],
        drop: Callable[[], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, T]:
        """Runs a job on each device and returns the results. No job is running when this returns or raises.

        Args:
            jobs: The job of each device, by the device's index.
            drop: Ends all waits of the jobs.
            meanwhile: Called while the jobs run.

        Raises:
            BaseException: The first error of a job, with a note that names its device, or an error from ``meanwhile``
                or a signal.
        """
        grad = torch.is_grad_enabled()
        started: dict[int, Future[T]] = {}
        try:
            for place, job in jobs.items():
                started[place] = self._pools[place].submit(_alone, job, grad)
            meanwhile()
            _until_over(started.values())
        finally:
            # Also if Ctrl-C came before all jobs were started.
            if started.keys() < jobs.keys() or not all(map(_went_well, started.values())):
                drop()
                wait(started.values())
        self._raise_first(started)
        return {place: future.result() for place, future in started.items()}

    def _raise_first(self, started: Mapping[int, Future[Any]]) -> None:
        errors = {place: error for place, future in started.items() if (error := future.exception())}
        own = {place: error for place, error in errors.items() if not isinstance(error, PeerThreadError)}
        for place, error in (own or errors).items():
            error.add_note(f"on device {self._devices[place]}, one of {len(self._devices)} of this process")
            raise error

    def close(self) -> None:
        """Ends the threads. It may be called twice."""
        for pool in self._pools:
            pool.shutdown()


def _settle(device: torch.device, place: int, cores: int) -> None:
    accelerators.set_current(device)
    if accelerators.is_accelerator(device):
        accelerators.seed(device, torch.initial_seed() + place)
    torch.set_num_threads(cores)


def _alone(job: Callable[[], T], grad: bool) -> T:
    """Runs the job with the caller's gradient mode, and backward in the same thread."""
    with torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
        return job()


def _until_over(futures: Collection[Future[Any]]) -> None:
    """Waits until all are done or one has failed. Waits are short, because a signal that comes just before a wait does
    not end it."""
    waiting: Collection[Future[Any]] = futures
    while waiting:
        done, waiting = wait(futures, _GLANCE_SECONDS, FIRST_EXCEPTION)
        if not all(map(_went_well, done)):
            return


def _went_well(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _nothing() -> None:
    pass


class ThreadBarrier:
    """A barrier for the threads that compute the parts of one micro-batch, usable any number of times.

    Two boards are used in turn, so that each exchange needs only one wait: before a thread writes to a board again, it
    has waited at the other board for all threads that read the first.

    Args:
        size: The number of threads.
    """

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size, self._timeout_seconds = size, timeout_seconds
        self._barrier = threading.Barrier(size, timeout=timeout_seconds)
        self._boards: list[list[Any]] = [[None] * size, [None] * size]
        self._turns = [0] * size
        self._dropped = False

    def bring(self, place: int, value: T) -> Callable[[], list[T]]:
        """Publishes this thread's value. The returned function must be called exactly once before the next call of this
        method.

        Returns:
            A function that waits for the other threads and returns the values of all in order. It raises
                PeerThreadError if the barrier was dropped, and RankTimeoutError if not all threads come in time.
        """
        board = self._boards[self._turns[place] % 2]
        self._turns[place] += 1
        board[place] = value

        def take_all() -> list[T]:
            self._meet()
            return list(board)

        return take_all

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            if self._dropped:
                raise PeerThreadError("another device failed") from None
            raise RankTimeoutError(
                f"not all of {self.size} devices came to a layer that looks at all samples within "
                f"{self._timeout_seconds:g} s: each must call the same such layers (BatchNorm) in the same order, "
                "whatever its samples"
            ) from None

    def drop(self) -> None:
        """Ends all waits at this barrier, also later ones."""
        self._dropped = True
        self._barrier.abort()


class ReplicaThreads(Peers):
    """Connects the threads that compute parts of the same micro-batch, for the BatchNorm layers of their replicas."""

    what = "devices"

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @contextmanager
    def joined(self, meeting: ThreadBarrier, place: int, watch: Stopwatch) -> Iterator[None]:
        """Within the block, this thread takes part in ``meeting``. ``watch`` is paused while the thread waits."""
        self._of_thread.now = meeting, place, watch
        try:
            yield
        finally:
            del self._of_thread.now

    def size(self) -> int:
        now = getattr(self._of_thread, "now", None)
        return now[0].size if now else 1

    def all_gather_later(self, message: Tensor, of: str) -> Later:
        meeting, place, watch = self._of_thread.now
        take_all = meeting.bring(place, (of, message))

        def later() -> Tensor:
            watch.pause()
            said: list[tuple[str, Tensor]] = take_all()
            kinds = {(of, tuple(one.shape)) for of, one in said}
            if len(kinds) > 1:
                words = ", ".join(f"{of} with a message of shape {shape}" for of, shape in sorted(kinds))
                raise TaskError(
                    f"the devices came to different layers that look at all samples: {words}. Each must call the same "
                    "BatchNorm modules in the same order, whatever its samples"
                )
            gathered = torch.stack([one.to(message.device) for _, one in said])
            watch.resume()
            return gathered

        return later
