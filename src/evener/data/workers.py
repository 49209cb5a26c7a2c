"""Worker processes that read data: PyTorch's DataLoader, which turns requests into values, in order, ahead of time.

The requests decide which samples a batch holds. The DataLoader draws them one by one in the main process, in place of
its sampler. It does no batching and no collating.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from multiprocessing.util import get_temp_dir
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from evener.data.fetch import ReadFailure
from evener.data.worker_deaths import awaited, leave_stopping_to_the_rank
from evener.errors import ConfigurationError, DataError
from evener.hardware.survey.host import allowed_cores
from evener.torch_internals.data_workers import end_by_kill

T = TypeVar("T")

WORKERS_PER_CORE = 64
"""Largest number of workers of a rank, for each core."""


@dataclass(frozen=True)
class Workers:
    """The settings of the worker processes that read data."""

    count: int = 0
    """The number of workers; 0 to read in the main process, when a value is requested."""
    prefetch_factor: int = 2
    """The number of requests that each worker reads ahead."""
    start_method: str | None = None
    """``fork``, ``spawn`` or ``forkserver``; ``None`` for Python's default."""
    timeout_seconds: float = 600
    """The longest wait for a value of a worker."""
    seed: int = 0
    """The seed of torch, random and NumPy in the workers, different in each worker. The main process is not seeded."""
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigurationError(f"{self.count} workers cannot read: give 0 to read in the main process")
        cores = allowed_cores()
        if self.count > WORKERS_PER_CORE * cores:  # a process for each would take the machine
            most = f"{WORKERS_PER_CORE * cores}, which is {WORKERS_PER_CORE} a core"
            raise ConfigurationError(
                f"asked for {self.count} workers for each rank on {cores} cores; ask for at most {most}"
            )
        if self.prefetch_factor < 1:
            raise ConfigurationError(f"prefetch_factor must be at least 1, not {self.prefetch_factor}")

    def begun_at(self, *place: int) -> Workers:
        """Returns the settings with a seed of their own for workers that begin there in the training; zeros are its
        beginning."""
        return replace(self, seed=seed_of(self.seed, *place)) if any(place) else self

    @property
    def ahead(self) -> int:
        """The largest number of requests drawn whose values were not yet returned."""
        return self.count * self.prefetch_factor

    def read(
        self, dataset: Dataset[Any], requests: Iterable[Any] | None = None
    ) -> Generator[Any, None, None]:
        """Yields ``dataset[request]`` for each request, or the items of an iterable data set.

        The workers end when the generator ends: after its last value, with an error, or when it is closed.

        Raises:
            DataError: If reading failed, took longer than the timeout, or a worker died.
        """
        alone = requests is not None and not self.count and not self.pin_memory
        # The DataLoader would do the same, but its overhead is larger than the time to read a small batch.
        values = map(dataset.__getitem__, requests or ()) if alone else iter(self._loader(dataset, requests))
        end_by_kill(values)
        limit = f"timeout_seconds is {self.timeout_seconds:g}"
        try:
            while (value := awaited(values, _END, limit)) is not _END:
                yield checked(value)
        finally:
            del values  # otherwise a traceback that somebody keeps would keep the workers alive

    def _loader(self, dataset: Dataset[Any], requests: Iterable[Any] | None) -> DataLoader[Any]:
        if self.count:
            get_temp_dir()  # removed by this process: one of their own stays if a worker is killed
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=requests,
            collate_fn=_as_it_is,
            num_workers=self.count,
            prefetch_factor=self.prefetch_factor if self.count else None,
            timeout=self.timeout_seconds if self.count else 0,
            multiprocessing_context=self.start_method if self.count else None,
            generator=torch.Generator().manual_seed(self.seed),
            pin_memory=self.pin_memory,
            worker_init_fn=leave_stopping_to_the_rank if self.count else None,
        )


def seed_of(seed: int, *place: int) -> int:
    """Returns a seed of 63 bits for a place, derived by NumPy's ``SeedSequence``."""
    return int(np.random.SeedSequence(seed, spawn_key=place).generate_state(1, np.uint64)[0] >> 1)


def checked(value: T) -> T:
    """Returns a value that was read.

    Raises:
        DataError: If it is a failure.
    """
    if isinstance(value, ReadFailure):
        raise DataError(value.message)
    return value


_END = object()


def _as_it_is(value: Any) -> Any:
    return value
