"""A thread for each device of a process, and what these threads tell each other.

Each keeps to its device, with its part of the cores where that is the CPU, and runs backward itself instead of leaving
it to autograd's own threads: so a layer that waits for the other devices can do so in both directions, and the thread
tells what is being computed.

::

    the process     jobs ────────────────────────────────────── all done, or the first error
    cpu:0           └─ forward ─ ● ─ forward ─ backward ─ ● ─┘
    cpu:1           └─ forward ─ ● ─ forward ─ backward ─ ● ─┘        ● the same BatchNorm on both: they meet

An error on one device ends the waits of the others, and is raised where the jobs were given out, with a note of the
device.
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
"""How long Ctrl-C may go unnoticed."""


class LeftAloneError(Exception):
    """Another device will not come, for reasons that it tells itself."""


class Crew:
    """The threads of ``devices``, started at once and ended by :meth:`close`."""

    def __init__(self, devices: Devices) -> None:
        self._devices, cores = devices, torch.get_num_threads()
        on_cpu = sum(device.type == "cpu" for device in devices)
        own = max(1, cores // max(1, on_cpu))
        self._pools = [
            ThreadPoolExecutor(1, f"evener {device}", partial(_settle, device, place, own))
            for place, device in enumerate(devices)
        ]
        self.run(dict.fromkeys(range(len(devices)), _nothing), _nothing)
        torch.set_num_threads(cores)  # of the process, for which a thread has set its own meanwhile

    def run(
        self,
        jobs: Mapping[int, Callable[[], T]],
        drop: Callable[[], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, T]:
        """What the job of each device returns. No job runs any more when this returns or raises.

        Args:
            jobs: By the place of the device.
            drop: Ends all waits of the jobs.
            meanwhile: Called while they run.

        Raises:
            BaseException: The first error of a job, with a note of its device; what came in from outside meanwhile.
        """
        grad = torch.is_grad_enabled()
        started: dict[int, Future[T]] = {}
        try:
            for place, job in jobs.items():
                started[place] = self._pools[place].submit(_alone, job, grad)
            meanwhile()
            _until_over(started.values())
        finally:
            # Also where Ctrl-C came before all had been given out.
            if started.keys() < jobs.keys() or not all(map(_went_well, started.values())):
                drop()
                wait(started.values())
        self._raise_first(started)
        return {place: future.result() for place, future in started.items()}

    def _raise_first(self, started: Mapping[int, Future[Any]]) -> None:
        errors = {place: error for place, future in started.items() if (error := future.exception())}
        own = {place: error for place, error in errors.items() if not isinstance(error, LeftAloneError)}
        for place, error in (own or errors).items():
            error.add_note(f"on device {self._devices[place]}, one of {len(self._devices)} of this process")
            raise error

    def close(self) -> None:
        """Ends the threads; may be called twice."""
        for pool in self._pools:
            pool.shutdown()


def _settle(device: torch.device, place: int, cores: int) -> None:
    if accelerators.is_accelerator(device):
        torch.accelerator.set_device_index(device)
        accelerators.seed(device, torch.initial_seed() + place)
    torch.set_num_threads(cores)


def _alone(job: Callable[[], T], grad: bool) -> T:
    """Runs the job as the process would, backward included."""
    with torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
        return job()


def _until_over(futures: Collection[Future[Any]]) -> None:
    """Until all are done or one has failed. A signal just before a wait does not end it: hence short ones."""
    waiting: Collection[Future[Any]] = futures
    while waiting:
        done, waiting = wait(futures, _GLANCE_SECONDS, FIRST_EXCEPTION)
        if not all(map(_went_well, done)):
            return


def _went_well(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _nothing() -> None:
    pass


class Meeting:
    """Where the threads that compute parts of one micro-batch wait for each other, any number of times.

    Two boards in turn make one wait enough: who writes to a board again has met those who read it at the other.

    Args:
        size: How many they are.
    """

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size, self._timeout_seconds = size, timeout_seconds
        self._barrier = threading.Barrier(size, timeout=timeout_seconds)
        self._boards: list[list[Any]] = [[None] * size, [None] * size]
        self._turns = [0] * size
        self._dropped = False

    def bring(self, place: int, value: T) -> Callable[[], list[T]]:
        """Puts down what this thread has for all. To be called then, once, before it brings more:

        Returns:
            Waits for the others, and gives the values of all in their order. Raises LeftAloneError if the meeting is
            dropped, and RankTimeoutError if not all come in time.
        """
        board = self._boards[self._turns[place] % 2]
        self._turns[place] += 1
        board[place] = value

        def take() -> list[T]:
            self._meet()
            return list(board)

        return take

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            if self._dropped:
                raise LeftAloneError("another device failed") from None
            raise RankTimeoutError(
                f"not all of {self.size} devices came to a layer that looks at all samples within "
                f"{self._timeout_seconds:g} s: each must call the same such layers (BatchNorm) in the same order, "
                "whatever its samples"
            ) from None

    def drop(self) -> None:
        """Nobody waits here any more."""
        self._dropped = True
        self._barrier.abort()


class Together(Peers):
    """The threads that compute parts of the same micro-batch, for the layers of all their replicas."""

    what = "devices"

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @contextmanager
    def joined(self, meeting: Meeting, place: int, watch: Stopwatch) -> Iterator[None]:
        """This thread takes part in ``meeting``; ``watch`` stands still while it waits."""
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
        take = meeting.bring(place, (of, message))

        def later() -> Tensor:
            watch.pause()
            said: list[tuple[str, Tensor]] = take()
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
