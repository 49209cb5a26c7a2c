"""The ledger of asynchronous training, on a virtual clock."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.virtual_clock import VirtualWorkers

from evener.errors import DataError
from evener.strategies.asynchronous.ledger import (
    Answer,
    Begun,
    Contribution,
    Ledger,
    Revoked,
    Terms,
    Wait,
    ages,
    check_whole,
)
from tests.tiers import ALWAYS, NIGHTLY, spread


def chaos(seed: int) -> VirtualWorkers:
    """Returns workers with stalls, deaths and joins, under rules that are drawn by the seed."""
    draw = random.Random(seed)
    number, batch = draw.randint(1, 6), draw.randint(1, 24)
    staleness = draw.choice([0, 0, 1, 2, 5, None])
    terms = Terms(batch, draw.choice([1, batch, batch, batch * 2]), staleness)
    ledger = Ledger(draw.randint(1, 150), terms, range(number))
    rates = [draw.choice([0.01, 0.03, 0.3]) for _ in range(number)]
    risks = [draw.choice([0.0, 0.05, 0.2]) for _ in range(3)]
    return VirtualWorkers(ledger, rates, seed, draw.randint(0, 2), *risks)


@pytest.mark.parametrize(
    "seeds", spread([range(2000), range(2000, 10_000)], ALWAYS, NIGHTLY), ids=["first", "more"]
)
def test_nothing_is_lost_or_doubled_or_too_old_whatever_happens(seeds: range) -> None:
    died, wasted, oldest = 0, 0, 0
    for seed in seeds:
        workers = chaos(seed)
        workers.run()
        ledger = workers.ledger
        check_whole(ledger.merges, ledger.size)
        found = ages(ledger.merges)
        sizes = [sum(each.size for each in held) for held in ledger.merges]
        if ledger.terms.staleness != 0:
            usual = ledger.size / math.ceil(ledger.size / ledger.terms.buffer)
            assert 2 * min(sizes[:-1], default=ledger.size) >= usual, seed
        if ledger.terms.staleness is not None:
            assert max(found) <= ledger.terms.staleness, seed
        died, wasted, oldest = (
            died + workers.died,
            wasted + workers.wasted + ledger.wasted,
            max(oldest, *found),
        )
    assert died > len(seeds) / 10
    assert wasted > len(seeds) / 10
    assert oldest > 5


def test_a_staleness_of_0_is_one_batch_after_the_other() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        ledger = Ledger(100, Terms(16, 16, 0), range(3))
        VirtualWorkers(ledger, [0.01, 0.02, 0.1], seed, draw.randint(0, 2), stalls=0.1).run()
        for number, held in enumerate(ledger.merges):
            assert min(each.start for each in held) == 16 * number
            assert max(each.stop for each in held) == min(100, 16 * (number + 1))


@pytest.mark.parametrize("rates", [[1, 3], [1, 1, 1, 3], [1, 2, 4, 8]])
def test_nobody_waits_for_a_slow_worker(rates: list[float]) -> None:
    ledger = Ledger(16 * 400, Terms(16, 16, 4), range(len(rates)))
    seconds = VirtualWorkers(ledger, rates).run()
    ideal = ledger.size / sum(1 / rate for rate in rates)
    assert ideal / seconds > 0.95
    assert ledger.wasted == 0


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("staleness", [None, 1])
def test_gradients_are_as_old_as_the_warning_of_a_small_buffer_says(
    workers: int, staleness: int | None
) -> None:
    ledger = Ledger(16 * 400, Terms(16, 1, staleness), range(workers))
    VirtualWorkers(ledger, [1.0] * workers).run()
    found = ages(ledger.merges)
    told = workers - 1 if staleness is None else min(workers - 1, staleness)
    assert 0.6 * told < sum(found) / len(found) < 1.1 * told


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_there_are_as_many_merges_as_batches(workers: int) -> None:
    for seed in range(50):
        ledger = Ledger(160 * workers, Terms(16 * workers, 16 * workers, 4), range(workers))
        VirtualWorkers(ledger, [1.0 + seed % 3] * workers, seed).run()
        assert len(ledger.merges) == 10


@pytest.mark.parametrize("size", [64 * 10, 64 * 10 + 8, 64 * 10 - 8, 70])
def test_what_is_left_of_a_buffer_makes_no_small_merge_and_none_less(size: int) -> None:
    ledger = Ledger(size, Terms(64, 64, 4), range(4))
    VirtualWorkers(ledger, [0.01, 0.01, 0.01, 0.01]).run()
    sizes = [sum(each.size for each in held) for held in ledger.merges]
    assert len(sizes) == math.ceil(size / 64)
    assert min(sizes) >= 32


def test_a_worker_with_most_of_the_samples_makes_no_small_merges() -> None:
    ledger = Ledger(64 * 50, Terms(64, 64, 4), range(4))
    VirtualWorkers(ledger, [0.001, 0.02, 0.02, 0.03], 1).run()
    sizes = [sum(each.size for each in held) for held in ledger.merges]
    assert max(sum(each.size for each in held if each.worker == 0) for held in ledger.merges) > 50
    assert 32 <= min(sizes) < max(sizes) <= 128
    assert abs(len(sizes) - 50) <= 1


class Interrupted(Ledger):
    """A ledger that is shortened at one of its calls."""

    def begin(self, worker: int, number: int | None, now: float) -> Answer:
        answer = super().begin(worker, number, now)
        draw = random.Random(self.size)
        if self.version > draw.randint(0, 8) and not hasattr(self, "whole"):
            self.whole = self.size
            assert self.shorten()
            while self.is_due():
                self.merge()
        return answer


def test_a_section_ends_early_with_whole_batches() -> None:
    shortened = 0
    for seed in range(500):
        draw = random.Random(seed)
        batch, number = draw.randint(4, 24), draw.randint(1, 5)
        terms = Terms(batch, draw.choice([1, batch, 2 * batch]), draw.choice([0, 1, 4, None]))
        ledger = Interrupted(draw.randint(50, 400), terms, range(number))
        rates = [draw.choice([0.01, 0.03, 0.3]) for _ in range(number)]
        VirtualWorkers(ledger, rates, seed, draw.randint(0, 2), 0.05).run()
        check_whole(ledger.merges, ledger.size)
        whole = getattr(ledger, "whole", ledger.size)
        assert ledger.size % batch == 0 or ledger.size == whole
        shortened += ledger.size < whole
    assert shortened > 250


def test_a_section_that_has_not_begun_is_not_shortened() -> None:
    ledger = Ledger(64, Terms(8, 8, 2), [0, 1])
    read = ledger.draw(0)
    assert read is not None
    assert not ledger.shorten()
    assert ledger.size == 64
    begun = ledger.begin(1, None, 0.0)
    assert isinstance(begun, Begun)
    assert ledger.shorten()
    assert ledger.size == 8
    assert isinstance(ledger.begin(0, read.number, 0.0), Revoked)


def test_a_stuck_worker_stops_nobody() -> None:
    ledger = Ledger(64, Terms(8, 8, 2), [0, 1])
    stuck = ledger.begin(1, None, 0.0)
    assert isinstance(stuck, Begun)
    now = 0.0
    while not ledger.is_over:
        found = ledger.begin(0, None, now)
        now += 1.0
        if isinstance(found, Begun):
            ledger.push(found.lease.number, now)
            while ledger.is_due():
                ledger.merge()
    assert not ledger.push(stuck.lease.number, now)
    check_whole(ledger.merges, 64)
    assert ledger.wasted == stuck.lease.size


def test_gradients_that_are_too_old_are_computed_again_in_smaller_ranges() -> None:
    ledger = Ledger(400, Terms(8, 8, 1), [0, 1])
    slow = ledger.begin(1, None, 0.0)
    assert isinstance(slow, Begun)
    for step in range(6):
        found = ledger.begin(0, None, float(step))
        assert isinstance(found, Begun | Wait)
        if isinstance(found, Begun):
            ledger.push(found.lease.number, step + 0.5)
        while ledger.is_due():
            ledger.merge()
    assert ledger.version > 1
    assert not ledger.push(slow.lease.number, 7.0)
    again = ledger.begin(1, None, 7.0)
    assert isinstance(again, Begun)
    assert again.lease.start == slow.lease.start
    assert again.lease.size <= slow.lease.size // 2


def test_an_idle_worker_takes_what_another_has_only_read() -> None:
    ledger = Ledger(8, Terms(8, 8, 1), [0, 1])
    mine, read = ledger.begin(0, None, 0.0), ledger.draw(1)
    assert isinstance(mine, Begun)
    assert read is not None
    while ledger.draw(1):
        pass
    ledger.push(mine.lease.number, 1.0)
    assert isinstance(ledger.begin(0, None, 1.0), Begun)
    last = max(number for number in range(8) if not isinstance(ledger.begin(1, number, 1.0), Begun))
    assert isinstance(ledger.begin(1, last, 1.0), Revoked)


@pytest.mark.parametrize(
    "ranges", [[(0, 4), (5, 8)], [(0, 5), (4, 8)], [(0, 4)], [(0, 4), (4, 8), (4, 8)], [(0, 9)]]
)
def test_a_ledger_that_is_not_whole_is_found(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(DataError, match="each sample once"):
        check_whole([[Contribution(0, 0, *each)] for each in ranges], 8)
    check_whole([[Contribution(0, 0, 4, 8)], [Contribution(1, 0, 0, 4)]], 8)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_no_range_has_a_single_sample(workers: int) -> None:
    for seed in range(200):
        draw = random.Random(seed)
        ledger = Ledger(draw.randint(12, 90), Terms(12, 12, draw.choice([0, 3])), range(workers))
        if ledger.size % 12 == 1 and ledger.terms.staleness == 0:
            continue  # the last batch has one sample
        VirtualWorkers(ledger, [draw.choice([0.01, 0.3]) for _ in range(workers)], seed, stalls=0.1).run()
        assert min(each.size for held in ledger.merges for each in held) > 1
