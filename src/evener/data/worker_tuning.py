"""How many workers read, decided from how long batches are waited for and how long the rest of a step takes.

A pure part: no clock, no machine. Without workers the wait for a batch is its reading::

    workers 0    | reading | rest of the step | reading | rest of the step | ...
    workers 2    | wait | rest of the step | wait | rest of the step | ...      others read meanwhile

Every number is a trial: one that makes a step no shorter is taken back, and no further one is tried. So the choice
ends, and is wrong by a window of steps at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, median

TRANSFER_SECONDS = 1e-3
"""What a batch costs the process that gets it from a worker: of two tensors of up to 0.4 MB together 0.9 to 1.2 ms of a
core, as measured with PyTorch's DataLoader on 2 cores of an x86-64 cloud machine (torch 2.13). Larger ones cost more,
which the trial finds."""
NEGLIGIBLE = 0.05
"""The part of a step that reading may take without anybody looking for it: other programs disturb a step as much."""
WAITING = 0.1
"""From this part of its time on it is said that a rank waits for batches."""
GAIN = 0.01
"""The part of a step that must be won for a number of workers to stay."""
HEADROOM = 1.25
"""Reading that is to be done over that which is done on average: some batches take longer, and a worker has its core
less often to itself than the training had."""
MOST = 16
"""More workers than this are chosen for no rank: each holds two batches, and shares by speed come so much later."""
_DRAWN = (
    "; samples draw random numbers, which are the workers' own from here on, so that another run may draw others: draw "
    "them from the index, or give workers as a number"
)
START_SECONDS = {"fork": 0.2}
"""What it takes until a worker has read its first batch, by the way in which it is started: 0.05 to 0.2 s for a fork
on 2 cores of an x86-64 cloud machine."""
FRESH_SECONDS = 5.0
"""For any other way, by which it imports PyTorch and the data set first: 3 s there, and more with several."""
FIRST_STEPS = 3
"""Steps at the start whose times say nothing: compilers and caches warm up."""
WINDOW_STEPS, WINDOW_SECONDS, WINDOW_MOST = 16, 1.0, 1024
"""Steps of a window and the time that it takes, both at least; where nothing changes the next is twice as long, until
it has the most steps."""


def cores_of(rank: int, hosts: Iterable[tuple[str, frozenset[int]]], quota: float | None = None) -> float:
    """This rank's part of its host's cores, of which ranks may have the same or, under SLURM, each its own.

    Args:
        hosts: Of each rank its host and the cores that it may use.
        quota: Cores' worth of time that the ranks of the host have together; None if it is not limited.
    """
    known = list(hosts)
    host, own = known[rank]
    beside = [cores for name, cores in known if name == host]
    part = sum(1 / sum(core in cores for cores in beside) for core in own)
    return part if quota is None else min(part, quota / len(beside))


def most_workers(cores: float) -> int:
    """Workers for which a rank with so many cores has room, beside one core for the training itself."""
    return max(0, min(MOST, math.floor(cores + 1e-9) - 1))


def workers_for(reading: float, rest: float, most: int) -> int:
    """So many, ``most`` at most, that reading a batch takes less time than the rest of a step.

    0 where reading takes next to nothing, or less than two transfers between processes.
    """
    if reading <= max(2 * TRANSFER_SECONDS, NEGLIGIBLE * (reading + rest)):
        return 0
    return min(most, math.ceil(HEADROOM * reading / rest)) if rest > 0 else most


class Window:
    """Times of steps in a row.

    An evaluation or a checkpoint between two steps is part of neither: of the rest the middle is taken. Of waits it is
    the mean, as several workers bring several batches at once, and then none for a while.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._waits, self._rests, self._seconds = list[float](), list[float](), 0.0

    def add(self, waited: float, rest: float) -> bool:
        """Whether it is complete."""
        self._waits.append(waited)
        self._rests.append(rest)
        self._seconds += waited + rest
        return len(self._waits) >= self.steps and self._seconds >= WINDOW_SECONDS

    @property
    def waited(self) -> float:
        return fmean(self._waits)

    @property
    def rest(self) -> float:
        return median(self._rests)


class Choice:
    """The number of a rank's workers as it follows the times of its steps.

    Args:
        most: Workers for which there is room.
        who: What the words call the reader, such as ``rank 0``.
        why_most: Why there is no room for more, in words.
    """

    def __init__(self, most: int, who: str = "rank 0", why_most: str = "no core is left for more") -> None:
        self.most, self._who, self._why_most = most, who, why_most
        self._left, self._start_seconds = math.inf, 0.0
        self.workers = 0
        """To be used from the next batch on."""
        self.draws = False
        """Whether random numbers are drawn for samples, of which it is said what becomes of them."""
        self._new: list[str] = []
        self._closed = ""
        """Why no other number is tried; empty while one may be."""
        self._told, self._ends = False, False
        self._trial: tuple[int, float] | None = None
        """The number before, and what a step took with it."""
        self._window, self._skip = Window(WINDOW_STEPS), FIRST_STEPS

    def begin(self, steps: int | None = None, start_method: str = "fork") -> None:
        """Another pass begins, of whose first steps the times say nothing.

        Args:
            steps: Of it; None if nobody knows.
            start_method: Of workers.
        """
        self._skip = FIRST_STEPS + 2 * self.workers
        self._left = math.inf if steps is None else steps
        self._start_seconds = START_SECONDS.get(start_method, FRESH_SECONDS)

    def limit(self, most: int, why: str) -> None:
        """There is no room for more than ``most``, for the reason ``why``."""
        if most < self.most:
            self.most, self._why_most = most, why

    def refuse(self, why: str) -> None:
        """Workers could not be started: there are none from now on."""
        self._set(0, WINDOW_STEPS)
        self._trial, self.most, self._closed, self._told = None, 0, why, True
        self._say(f"stays without workers: {why}")

    def new_words(self) -> list[str]:
        """What has been decided since the last call."""
        new, self._new = self._new, []
        return new

    def add(self, waited: float, rest: float) -> None:
        """The times of a step, in seconds."""
        self._left -= 1
        if self._skip:
            self._skip -= 1
        elif self._window.add(waited, rest):
            self._judge(self._window.waited, self._window.rest)

    def _judge(self, waited: float, rest: float) -> None:
        if self._trial is not None and self._failed(waited + rest):
            return
        self._trial = None
        wanted = self.workers if self._closed else self._wanted(waited, rest)
        self._ends = wanted > self.workers and self._left * waited < self._start_seconds
        if wanted > self.workers and not self._ends:
            if self._window.steps > WINDOW_STEPS:  # it may have begun with other times, which are no measure
                self._window = Window(WINDOW_STEPS)
            else:
                self._try(wanted, waited, rest)
            return
        if not self._told and waited > WAITING * (waited + rest):
            self._told = True
            self._say(f"{_waits(waited, rest)}, {with_workers(self.workers)}: {self.why_not}")
        self._window = Window(min(2 * self._window.steps, WINDOW_MOST))

    def _wanted(self, waited: float, rest: float) -> int:
        if not self.workers:
            return workers_for(waited, rest, self.most)
        if waited <= NEGLIGIBLE * (waited + rest):
            return self.workers
        # Workers that are waited for have been reading all the time.
        needed = workers_for(self.workers * (waited + rest), rest, self.most)
        return min(self.most, max(self.workers + 1, needed))

    def _failed(self, seconds: float) -> bool:
        """Whether the trial was for nothing; the number before is taken again then."""
        assert self._trial is not None
        (before, then), tried = self._trial, self.workers
        if seconds < (1 - GAIN) * then:
            return False
        self._trial = None
        self._closed = f"{with_workers(tried)} a step took {_ms(seconds)}"
        self._say(
            f"goes back to {before} worker{'s' * (before != 1)}: a step took {_ms(then)} {with_workers(before)}, and "
            f"{_ms(seconds)} {with_workers(tried)}"
        )
        self._set(before, WINDOW_STEPS)
        return True

    def _try(self, wanted: int, waited: float, rest: float) -> None:
        self._trial = self.workers, waited + rest
        drawn = "" if self.workers or not self.draws else _DRAWN
        self._say(
            f"{_waits(waited, rest)}: {wanted} worker{'s' * (wanted != 1)} read{'s' * (wanted == 1)} for it{drawn}"
        )
        self._set(wanted, WINDOW_STEPS)

    def _set(self, workers: int, steps: int) -> None:
        self._window, self._skip = Window(steps), FIRST_STEPS + 2 * max(workers, self.workers)
        self.workers = workers

    @property
    def why_not(self) -> str:
        """Why there are no more workers."""
        if self._closed:
            return self._closed
        if self._ends:
            return "what is left to be read would be over before more had been started"
        if self.workers < self.most:
            return "workers would take longer to hand a batch over than it takes to be read"
        return self._why_most

    def _say(self, words: str) -> None:
        self._new.append(f"{self._who} {words}")


def with_workers(count: int) -> str:
    return f"with {count} worker{'s' * (count != 1)}" if count else "without workers"


def _waits(waited: float, rest: float) -> str:
    share = waited / (waited + rest)
    return f"waits for batches {share:.0%} of its time ({_ms(waited)} of {_ms(waited + rest)} a step)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
