"""Streams that are resumed by their state. The ranks are played one after the other: each reads the whole stream."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from evener.data.batch import Batch
from evener.data.division import by_weights
from evener.data.loader import Loader
from evener.data.stream_state import RecentStates, StreamState
from evener.errors import ConfigurationError, DataError

SIZE = 230


class Tally(list[int]):
    """Counts for copies of a stream too."""

    def __deepcopy__(self, memo: Any) -> Tally:
        return self


class Stream(IterableDataset[Any]):
    """Numbers in an order of the epoch. Notes how many it yielded."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.epoch, self.yielded = size, 0, Tally()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _numbers(self) -> list[int]:
        return np.random.default_rng(self.epoch).permutation(self.size).tolist()  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        for number in self._numbers():
            self.yielded.append(1)
            yield float(number), number


class Stateful(Stream):
    """Knows its place."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.at = self.begins_at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins_at = self.begins_at, 0
        for number in self._numbers()[self.at :]:
            self.at += 1
            self.yielded.append(1)
            yield float(number), number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": [None, (1, 2.0), torch.tensor([3])]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["at"]


class Forgetful(Stateful):
    """Its state does not hold all: as that of a shuffle buffer, which is filled anew."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["at"] + 3


class ByIterator(Stream):
    """The iterator has the state, and not the data set."""

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self)


class _Iterator(Iterator[Any]):
    def __init__(self, stream: Stream) -> None:
        self.numbers, self.stream, self.at = stream._numbers(), stream, 0

    def __next__(self) -> Any:
        if self.at == len(self.numbers):
            raise StopIteration
        self.stream.yielded.append(1)
        self.at += 1
        return float(self.numbers[self.at - 1]), 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def values(batch: Batch) -> list[float]:
    return [x for part in batch.micro_batches if part.weight for x in part.inputs.tolist()]


Place = tuple[tuple[int, int], StreamState | None]


def ranks_read(
    kind: Any, world_size: int, place: Place, stop: int | None = None, seed: int = 0, **options: Any
) -> tuple[list[list[float]], Place, list[Any], list[str]]:
    """The samples of each batch, the place after them with the state for it, the streams, and what was told."""

    def shares(step: int, size: int) -> list[int]:
        return by_weights(size, np.random.default_rng(seed + step).random(world_size).tolist())

    told: list[str] = []
    streams = [kind() for _ in range(world_size)]
    given = {
        "batch_size": 7,
        "epochs": 2,
        "start": place[0],
        "resume": place[1],
        "tell": told.append,
    } | options
    loaders = [
        Loader(
            stream,
            None,
            rank=rank,
            world_size=world_size,
            shares=shares,
            agree=lambda size: [size] * world_size,
            **given,
        )
        for rank, stream in enumerate(streams)
    ]
    batches, at = [], place[0]
    for parts in itertools.islice(zip(*loaders, strict=True), stop):
        batches.append(sorted(itertools.chain.from_iterable(map(values, parts))))
        first = parts[0]
        at = (first.epoch + 1, 0) if first.last else (first.epoch, first.position + first.size)
    state = loaders[-1].stream_states.before(*at)
    for loader in loaders:
        loader.close()
    return batches, (at, state), streams, told


BEGINNING: Place = ((0, 0), None)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([Stream, Stateful, Forgetful, ByIterator]),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 30)), max_size=3),
    st.integers(0, 99),
    st.sampled_from([None, 3]),
)
def test_each_sample_counts_once_however_often_the_ranks_change(
    kind: Any, parts: list[tuple[int, int]], seed: int, micro_batch: int | None
) -> None:
    seen, place = [], BEGINNING
    for world_size, stop in [*parts, (2, None)]:
        options: Any = {"seed": seed, "micro_batch": micro_batch}
        found, place, _, _ = ranks_read(kind, world_size, place, stop, **options)
        seen += found
    assert seen == ranks_read(kind, 1, BEGINNING)[0]
    for epoch in (0, 1):
        ours = seen[epoch * 33 : (epoch + 1) * 33]
        assert sorted(itertools.chain.from_iterable(ours)) == [float(number) for number in range(SIZE)]


@pytest.mark.parametrize("kind", [Stateful, ByIterator])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_read_the_same(kind: Any, workers: int) -> None:
    first, place, _, _ = ranks_read(kind, 2, BEGINNING, 50, workers=workers)
    assert place[1] is not None
    second, _, _, told = ranks_read(kind, 1, place, workers=workers)
    assert first + second == ranks_read(kind, 1, BEGINNING)[0]
    assert told == []


@pytest.mark.parametrize("kind", [Stateful, ByIterator])
def test_a_stream_with_a_state_is_not_read_again(kind: Any) -> None:
    _, place, _, _ = ranks_read(kind, 1, BEGINNING, 28)
    assert place[0] == (0, 196)
    _, _, (resumed,), told = ranks_read(kind, 1, place, epochs=1)
    assert len(resumed.yielded) == SIZE - 192
    assert told == []


def test_a_state_that_is_not_exact_is_told_and_the_stream_read_again() -> None:
    _, place, _, _ = ranks_read(Forgetful, 1, BEGINNING, 28)
    found, _, (stream,), told = ranks_read(Forgetful, 1, place)
    assert found == ranks_read(Stream, 1, BEGINNING)[0][28:]
    assert len(stream.yielded) > SIZE
    assert "does not lead to the sample that came next before" in told[0]


def test_a_stream_that_cannot_be_copied_is_resumed_but_not_read_again() -> None:
    class Locked(Stateful):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    class ForgetfulLocked(Forgetful, Locked):
        pass

    _, place, _, _ = ranks_read(Locked, 1, BEGINNING, 28)
    assert ranks_read(Locked, 1, place)[0] == ranks_read(Stream, 1, BEGINNING)[0][28:]
    with pytest.raises(DataError, match="cannot be read again in this process: read it with one worker"):
        ranks_read(ForgetfulLocked, 1, place)


def test_a_stream_that_has_become_shorter_is_told() -> None:
    place: Place = ((0, 196), None)
    with pytest.raises(DataError, match="ended after 100 samples, and the run goes on after 196"):
        ranks_read(lambda: Stream(100), 1, place)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_no_checkpoint_can_hold_is_told_early(workers: int) -> None:
    class WithArrays(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"place": [np.arange(3)]}

    with pytest.raises(DataError, match=r"state_dict of the data stream.place\[0\] is .*ndarray"):
        ranks_read(WithArrays, 1, BEGINNING, workers=workers)


def test_states_are_kept_for_batches_that_are_made_ahead() -> None:
    states = RecentStates()
    for read in range(64, 64 * 100, 64):
        states.keep(StreamState(0, read, None, "next"))
        states.made((0, read))
    found = states.before(0, 64 * 94)
    assert found is not None
    assert found.read == 64 * 94
    assert len(states._states) < 12
    assert states.before(1, 10) is None


def test_a_state_of_another_form_is_refused() -> None:
    state = StreamState(1, 64, {"a": [1]}, "digest")
    assert StreamState.from_plain(state.as_plain()) == state
    for wrong in ({}, state.as_plain() | {"read": "x"}, state.as_plain() | {"epoch": True}):
        with pytest.raises(ConfigurationError, match="another form"):
            StreamState.from_plain(wrong)
