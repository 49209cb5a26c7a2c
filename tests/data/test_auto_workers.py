"""Workers whose number changes between two batches: what they read is what none of them would have read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from evener.data import auto_workers
from evener.data import worker_tuning as worker_count
from evener.data.auto_workers import AutoWorkers, Requests, nbytes_of, room_for
from evener.data.batch import Batch
from evener.data.loader import Loader
from evener.data.sampler import Order
from evener.data.worker_tuning import Choice
from evener.data.workers import Workers
from evener.errors import ConfigurationError, DataError

SIZE = 96


class Slow(Dataset[Any]):
    """Sample ``i`` is ``(float(i), pid of who reads it)``, and takes a while."""

    def __init__(self, seconds: float = 0.004, bad: int = -1) -> None:
        self.seconds, self.bad = seconds, bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[float, int]:
        time.sleep(self.seconds)
        if index == self.bad:
            raise KeyError("no file")
        return float(index), os.getpid()


class Drawing(Slow):
    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(torch.rand(())), index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Planned(Choice):
    """Says a number from a batch on, whatever the times are."""

    def __init__(self, plan: dict[int, int]) -> None:
        super().__init__(max(plan.values(), default=0))
        self._plan, self._step = plan, 0

    def add(self, waited: float, rest: float) -> None:
        self._step += 1
        self.workers = self._plan.get(self._step, self.workers)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that are short, and transfers that cost nothing."""
    monkeypatch.setattr(worker_count, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(worker_count, "WINDOW_STEPS", 3)
    monkeypatch.setattr(worker_count, "TRANSFER_SECONDS", 0.0)


def read(workers: int | Choice, dataset: Any = None, **options: Any) -> list[Batch]:
    options = {"batch_size": 8, "micro_batch": 4, "epochs": 2} | options
    with Loader(dataset or Slow(0), Order(SIZE, seed=1), workers=workers, **options) as loader:
        return list(loader)


def told(batches: list[Batch]) -> list[Any]:
    """All but who has read it."""
    return [
        (
            batch.epoch,
            batch.index,
            batch.position,
            batch.shares,
            batch.last,
            micro.samples.tolist(),
            micro.inputs,
        )
        for batch in batches
        for micro in batch.micro_batches
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a[:-1] == b[:-1] and torch.equal(a[-1], b[-1]) for a, b in zip(one, other, strict=True)
    )


def readers(batches: list[Batch]) -> list[int]:
    return [int(micro.targets[0]) for batch in batches for micro in batch.micro_batches]


@pytest.mark.parametrize("plan", [{3: 2}, {2: 1, 6: 3, 15: 0}, {1: 2, 2: 0, 3: 1}, {23: 1}])
def test_a_change_of_workers_loses_and_repeats_nothing(plan: dict[int, int]) -> None:
    expected = told(read(0))
    batches = read(Planned(plan))
    assert same(told(batches), expected)
    assert set(readers(batches)) > {os.getpid()}


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_may_change_when_it_likes(rank: int) -> None:
    options = {"rank": rank, "world_size": 2, "start": (0, 24)}
    assert same(told(read(Planned({2 + rank: 1}), **options)), told(read(0, **options)))


def test_no_more_is_drawn_ahead_than_the_most_workers_draw() -> None:
    asked: list[int] = []

    def shares(step: int, size: int) -> list[int]:
        asked.append(step)
        return [size]

    choice = Planned({2: 2, 12: 1})
    loader = Loader(Slow(0), Order(SIZE), batch_size=8, epochs=2, shares=shares, workers=choice)
    assert loader.lookahead == 4
    ahead = [len(asked) - 1 - step for step, _ in enumerate(loader)]
    assert ahead[:2] == [0, 0]
    assert max(ahead) == 4
    assert asked == list(range(24))


def test_a_slow_data_set_gets_workers_by_itself(quick: None) -> None:
    choice = Choice(2)
    batches, expected = [], told(read(0))
    with Loader(Slow(), Order(SIZE, seed=1), batch_size=8, micro_batch=4, epochs=2, workers=choice) as loader:
        for batch in loader:
            batches.append(batch)
            time.sleep(0.02)
    assert same(told(batches), expected)
    assert "read" in choice.new_words()[0]
    assert readers(batches)[0] == os.getpid()
    assert set(readers(batches)) > {os.getpid()}


def test_workers_end_with_the_loader() -> None:
    loader = Loader(Slow(0), Order(SIZE), batch_size=8, epochs=9, workers=Planned({1: 2}))
    pids = {int(next(loader).micro_batches[0].targets[0]) for _ in range(12)} - {os.getpid()}
    assert len(pids) == 2
    loader.close()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_sample_that_a_later_worker_cannot_read_is_named() -> None:
    with pytest.raises(DataError, match="reading sample 90 of the training set failed: KeyError: 'no file'"):
        read(Planned({2: 1}), Slow(0, bad=90))


def test_a_data_set_that_cannot_be_sent_stays_where_it_is() -> None:
    dataset: Any = Slow(0)
    dataset.lock = threading.Lock()
    choice = Planned({2: 1})
    batches = read(choice, dataset, start_method="spawn")
    assert same(told(batches), told(read(0)))
    assert set(readers(batches)) == {os.getpid()}
    (words,) = choice.new_words()
    assert words.startswith(
        "rank 0 stays without workers: they could not be started (TypeError: cannot pickle"
    )


def test_drawing_random_numbers_is_noticed() -> None:
    choice = Planned({})
    read(choice, Slow(0))
    assert not choice.draws
    read(choice, Drawing(0))
    assert choice.draws


def test_workers_of_a_second_number_draw_other_random_numbers() -> None:
    batches = read(Planned({1: 1, 6: 2, 12: 1}), Drawing(0))
    drawn = [value for batch in batches for micro in batch.micro_batches for value in micro.inputs.tolist()]
    assert len(set(drawn)) == len(drawn)


def test_an_iterable_data_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be chosen: it is iterable"):
        Loader(Stream(), None, batch_size=4, workers=Choice(1))


def test_a_small_shared_memory_limits_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read(0)[0]
    assert nbytes_of(batch) == 8 * 16
    free = SimpleNamespace(
        f_bavail=2 * 3 * 64 * 5, f_frsize=1
    )  # half of it: 5 workers of 3 requests of 4 samples
    monkeypatch.setattr(auto_workers.os, "statvfs", lambda path: free)
    assert room_for(batch, prefetch_factor=2, ranks=1) == 5
    assert room_for(batch, prefetch_factor=2, ranks=2) == 2
    choice = Choice(8)
    read(choice)
    assert choice.most == 5
    assert choice.why_not == "workers would take longer to hand a batch over than it takes to be read"


def test_a_machine_without_shared_memory_has_no_such_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "SHARED_MEMORY", "/no/such/directory")
    assert room_for(read(0)[0], 2, 1) is None


def test_requests_are_handed_out_until_others_are_to_get_them() -> None:
    over = False
    requests = Requests(iter(range(3)), lambda: over)
    assert next(requests) == 0
    over = True
    assert list(requests) == []
    assert not requests.ended
    over = False
    assert list(requests) == [1, 2]
    assert requests.ended
    assert requests.drawn == 3


def test_the_clock_tells_waits_from_the_rest() -> None:
    seen: list[tuple[float, float]] = []
    choice = Planned({})
    choice.add = lambda waited, rest: seen.append((waited, rest))  # type: ignore[method-assign]
    now = iter([0.0, 2.0, 7.0, 8.0, 8.5, 9.0])
    auto = AutoWorkers(Workers(), choice, clock=lambda: next(now))
    for _ in auto.watched(batch for batch in read(0)[:2]):
        pass
    assert seen == [(2.0, 5.0), (1.0, 0.5)]
