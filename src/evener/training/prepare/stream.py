"""A user's own DataLoader of an iterable data set, whose whole batches every rank reads.

A stream has no numbers that could be divided before it is read. So each rank reads each batch, as one device would, and
collates its share of it. The batches are those of the loader itself, with any number of its workers: they yield items
instead of collated batches, each batch with the number of its worker and the state of the worker's data set.

The states of the workers lead to one place only together: before a batch of the first worker of a round. That place is
kept for a checkpoint, with the digest of the item that follows; from there to the loop's own place is less than a
round. If a resumed stream begins with another item, it is read from its beginning instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from evener.data.fingerprint import digest_if_any
from evener.data.stream_state import check_plain, copied, has_state
from evener.data.worker_deaths import awaited, begun
from evener.errors import ConfigurationError, DataError
from evener.training.prepare.loop_state import LoopState

Place = dict[str, Any]
"""A place between two batches: their number, that of the samples, the states of the workers, the next item's digest."""


_PLACE = ("batches", "position", "states", "following")


class WholeBatches:
    """The batches of a loader of a stream, as lists of items.

    Args:
        options: Options of the loader that are passed on.
        generator: Seeds the workers, the same on all ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], options: dict[str, Any], generator: torch.Generator, place: LoopState
    ) -> None:
        self._dataset, self._place, self._generator = loader.dataset, place, generator
        self._workers, self._given_init = loader.num_workers, options["worker_init_fn"]
        self._options = options | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        self._limit = f"the DataLoader has timeout={loader.timeout:g}"
        self._reader = self._loader(self._dataset)
        self.kept: Place | None = None
        """The last place of which all workers' states are known."""
        self.resume: Place | None = None
        """The place from which the next pass begins."""

    def __iter__(self) -> Iterator[tuple[int, int, str, list[Any]]]:
        """Yields for each batch its number, that of its first sample, the digest of its first item, and the items."""
        resume, self.resume, self.kept = self.resume, None, None
        if resume is not None:
            dataset = self._dataset if self._workers else copied(self._dataset)
            may_read_again = dataset is not None
            batches = self._pass(self._dataset if dataset is None else dataset, resume)
            first = next(batches, None)
            same = first is not None and first[2] == resume["following"]
            if all(self._place.session.control.gather_objects(same)):
                assert first is not None
                yield first
                yield from batches
                return
            self._complain(may_read_again)
        yield from self._pass(self._dataset, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the last place of which all workers' states are known, if there is one, and the number of workers."""
        return {"workers": max(1, self._workers), "place": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next pass begin at the place in ``state``.

        Raises:
            ConfigurationError: If the loader had other workers: the batches of a stream depend on their number.
        """
        if state["workers"] != max(1, self._workers):
            raise ConfigurationError(
                f"the loader of a stream was saved with {state['workers']} workers, and has {max(1, self._workers)} "
                "now: its batches would be others; set num_workers as before, or go on from the end of an epoch"
            )
        place = state["place"]
        self.resume = None if place is None else {name: place[name] for name in _PLACE}

    def _complain(self, may_read_again: bool) -> None:
        words = (
            "the state of a loader's data set does not lead to the sample that came next before: it does not hold all "
            "(a shuffle buffer, perhaps), or samples are random"
        )
        if not may_read_again:
            raise DataError(f"{words}. It cannot be read again in this process: use num_workers=1")
        if self._place.rank == 0:
            warnings.warn(f"{words}. It is read again from the beginning of the epoch", stacklevel=2)

    def _pass(self, dataset: Any, place: Place | None) -> Iterator[tuple[int, int, str, list[Any]]]:
        """Reads the batches from ``place`` on, or all."""
        begin, position = (0, 0) if place is None else (place["batches"], place["position"])
        states: dict[int, Any] = {} if place is None else dict(place["states"])
        if place is not None and not self._workers:
            dataset.load_state_dict(deepcopy(states[0]))
        plain = dataset is self._dataset and place is None
        reader = self._reader if plain else self._loader(dataset, states)
        source, last = self._begun(reader), -1
        for number in count(begin):
            found = self._next(source)
            if found is None:
                return
            items, worker, state = found
            digest = digest_if_any(items[0]) if items else ""
            if worker <= last and states and digest:
                self.kept = dict(zip(_PLACE, (number, position, dict(states), digest), strict=True))
            if place is not None and number == begin:
                self.kept = place
            if state is not None:
                states[worker] = state
            last = worker
            yield number, position, digest, items
            position += len(items)

    def _begun(self, reader: DataLoader[Any]) -> Iterator[Any]:
        if self._workers:
            return begun(reader, self._limit)
        with self._place.random.drawn():
            return iter(reader)

    def _next(self, source: Iterator[Any]) -> Any:
        """Returns the next batch. What the stream draws in this process is drawn alike on all ranks."""
        if self._workers:
            return awaited(source, None, self._limit)
        with self._place.random.drawn():
            return next(source, None)

    def _loader(self, dataset: Any, states: dict[int, Any] | None = None) -> DataLoader[Any]:
        begin = _WorkerBeginning(self._given_init, states) if states else self._given_init
        options = self._options | {"worker_init_fn": begin, "pin_memory": False}
        return DataLoader(dataset, collate_fn=_ItemsWithState(dataset), generator=self._generator, **options)


class _ItemsWithState:
    """A collate function that keeps the items, and adds the number of the worker and the state of its data set."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, items: list[Any]) -> tuple[list[Any], int, Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        dataset: Any = self._dataset if info is None else info.dataset
        if not has_state(dataset):
            return items, worker, None
        state = deepcopy(dataset.state_dict())
        check_plain(state)
        return items, worker, state


class _WorkerBeginning:
    """Loads the state of a worker's data set when the worker begins, after the user's own function."""

    def __init__(self, given: Callable[[int], None] | None, states: dict[int, Any]) -> None:
        self._given, self._states = given, states

    def __call__(self, worker: int) -> None:
        if self._given is not None:
            self._given(worker)
        info = get_worker_info()
        if info is not None and worker in self._states:
            dataset: Any = info.dataset
            dataset.load_state_dict(self._states[worker])
