"""Workers whose number changes while they read: requests go on where they were, and each value comes once, in order.

Between two numbers the workers there are get no further requests, hand over what they were asked for, and end; the
others start with the next request. What is drawn ahead is never more than the larger number draws.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evener.data.batch import Batch
from evener.data.prefetch import Batches
from evener.data.worker_tuning import Choice
from evener.data.workers import Workers

SHARED_MEMORY = "/dev/shm"
_SHARED_PART = 0.5
"""Of what is free there, which the batches of workers may fill; a worker that finds no room is killed."""


class Requests(Iterator[Any]):
    """The requests of one number of workers after the other.

    Args:
        is_over: Whether those that are asking get no more.
    """

    def __init__(self, source: Iterator[Any], is_over: Callable[[], bool]) -> None:
        self._source, self._is_over = source, is_over
        self.drawn = 0
        self.ended = False

    def __next__(self) -> Any:
        if self._is_over():
            raise StopIteration
        try:
            request = next(self._source)
        except StopIteration:
            self.ended = True
            raise
        self.drawn += 1
        return request


class AutoWorkers:
    """Reads as ``Workers`` do, with as many as ``choice`` says, and tells it the times of the steps.

    Args:
        workers: Those of any number but 0 are pinned as these.
        ranks: On this machine, which share its memory.
    """

    def __init__(
        self,
        workers: Workers,
        choice: Choice,
        ranks: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._workers, self._choice, self._ranks, self._clock = workers, choice, ranks, clock
        self._count, self._looked = 0, False

    @property
    def ahead(self) -> int:
        """The most requests that are ever drawn beyond those whose values were handed out."""
        return replace(self._workers, count=self._choice.most).ahead

    def read(self, dataset: Dataset[Any], requests: Iterator[Any]) -> Generator[Any, None, None]:
        """``dataset[request]`` for each request, in order.

        Raises:
            DataError: As ``Workers.read``.
        """
        source = Requests(requests, lambda: self._count != self._choice.workers)
        while not source.ended:
            self._count = self._choice.workers
            with closing(self._with(self._count, dataset, source)) as values:
                yield from values

    def _with(self, count: int, dataset: Dataset[Any], requests: Requests) -> Generator[Any, None, None]:
        """Values until the requests end. If workers cannot be started there are none, and the choice is told."""
        pinned = self._workers.pin_memory and count > 0
        # Workers of a second number draw other random numbers than the first have drawn.
        using = replace(
            self._workers, count=count, pin_memory=pinned, seed=self._workers.seed + requests.drawn
        )
        with closing(using.read(dataset, requests)) as values:
            first = self._started(values, requests) if count else self._drawing(values)
            if first is not _END:
                yield first
                yield from values

    def _started(self, values: Iterator[Any], requests: Requests) -> Any:
        """The first value of workers, none if they cannot be started."""
        drawn = requests.drawn
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what PyTorch warns of where it fails is told in its stead
                return next(values, _END)
        except Exception as error:
            if requests.drawn > drawn:  # they have started, and it is reading that failed
                raise
            self._choice.refuse(f"they could not be started ({type(error).__name__}: {error})")
            return _END

    def _drawing(self, values: Iterator[Any]) -> Any:
        """The first value; the choice is told if random numbers were drawn for it."""
        before = _generators()
        first = next(values, _END)
        self._choice.draws |= _generators() != before
        return first

    def watched(self, batches: Batches, steps: int | None = None) -> Batches:
        """The same batches; how long each was waited for, and what came after it, is told to the choice.

        Args:
            steps: How many there are; None if nobody knows.
        """
        clock, choice = self._clock, self._choice
        choice.begin(steps, self._workers.start_method or multiprocessing.get_start_method())
        with closing(batches):
            began = clock()
            while (batch := next(batches, None)) is not None:
                got = clock()
                if not self._looked:
                    self._look_for_room(batch)
                yield batch
                now = clock()
                choice.add(got - began, now - got)
                began = now

    def _look_for_room(self, batch: Batch) -> None:
        self._looked = True
        room = room_for(batch, self._workers.prefetch_factor, self._ranks)
        if room is not None:
            self._choice.limit(room, f"{SHARED_MEMORY} has no room for the batches of more")


def room_for(batch: Batch, prefetch_factor: int, ranks: int) -> int | None:
    """Workers whose batches have room in shared memory; None if nobody knows, as without such a directory."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    request = nbytes_of(batch) / len(batch.micro_batches)
    room = _SHARED_PART * found.f_bavail * found.f_frsize / ranks
    return int(room / (request * (prefetch_factor + 1))) if request else None


def nbytes_of(batch: Batch) -> int:
    """Of its tensors."""
    sizes: list[int] = []
    batch.map(lambda leaf: sizes.append(leaf.nbytes) if isinstance(leaf, Tensor) else None)
    return sum(sizes)


def _generators() -> tuple[Any, ...]:
    """The states of the generators that data sets draw from."""
    return torch.get_rng_state().numpy().tobytes(), str(np.random.get_state()), random.getstate()


_END = object()
