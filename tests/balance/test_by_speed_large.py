"""Balancers of many ranks, each of which knows its own times alone."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from evener.balance.base import Balancer, Decision
from evener.balance.by_speed import BySpeed
from evener.balance.by_speed_large import BINS, BySpeedOfMany, SpeedReport
from evener.balance.division import Division
from evener.balance.shares import solve
from evener.balance.time_model import Line
from evener.balance.vectorized_lines import DivisionOfMany, Lines
from evener.errors import ShareError
from tests.balance.simulator import Rank, Step, simulate, slow_between


def together(reports: Sequence[SpeedReport]) -> SpeedReport:
    """The reports of all ranks, reduced as a step reduces them."""
    added = [sum(column) for column in zip(*(report.added for report in reports), strict=True)]
    greatest = [max(column) for column in zip(*(report.greatest for report in reports), strict=True)]
    return SpeedReport(tuple(added), tuple(greatest))


class Crowd(Balancer):
    """The balancers of all ranks, which tell each other what they would over a network; all of one mind."""

    def __init__(self, teams: Sequence[Sequence[int]], **options: Any) -> None:
        self.part_of = {rank: part for part, team in enumerate(teams) for rank in team}
        self.ranks = [
            BySpeedOfMany(len(teams), self.part_of[rank], teams, **options) for rank in sorted(self.part_of)
        ]
        self.looks = 0

    @classmethod
    def of(cls, parts: int, **options: Any) -> Crowd:
        return cls([(part,) for part in range(parts)], **options)

    def shares(self, step: int, batch_size: int) -> list[int]:
        (found,) = {tuple(each.shares(step, batch_size)) for each in self.ranks}
        return list(found)

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """``seconds`` are those of ranks, or of parts that one rank computes."""
        (asks,) = {each.asks for each in self.ranks}
        lines = [each.line() for each in self.ranks] if asks else []
        self.looks += asks
        parts = [self.part_of[rank] for rank in range(len(self.ranks))]
        own = zip(self.ranks, parts, seconds, strict=True)
        reduced = together([each.voice(sizes[part], time) for each, part, time in own])
        for rank, each in enumerate(self.ranks):
            each.hear(step, sizes, seconds[rank], reduced, lines)

    @property
    def decisions(self) -> Sequence[Decision]:
        first, *others = [tuple(each.decisions) for each in self.ranks]
        assert all(other == first for other in others)
        return first


def total(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps)


@pytest.mark.parametrize("seed", range(3))
def test_many_unequal_ranks_end_near_the_optimum(seed: int) -> None:
    ranks = [Rank(0.004, 0.0001 * (1 + rank % 4)) for rank in range(12)]
    crowd = Crowd.of(12)
    late = simulate(crowd, ranks, 12 * 64, 120, seed=seed)[60:]
    assert total(late) < 1.05 * sum(step.optimum for step in late)
    assert crowd.decisions[0].reason.startswith("ranks differ in speed")
    assert crowd.looks < 25, "lines travel seldom"


@pytest.mark.parametrize("seed", range(3))
def test_a_slowdown_is_followed_and_so_is_its_end(seed: int) -> None:
    ranks = [Rank(0.004, 0.0002), Rank(0.004, 0.0002, slow_between(100, 200, 2)), *[Rank(0.004, 0.0002)] * 4]
    crowd = Crowd.of(6)
    steps = simulate(crowd, ranks, 384, 300, seed=seed)
    for begin, end in ((50, 100), (120, 200), (220, 300)):
        assert max(step.excess for step in steps[begin:end]) < 0.10
    reasons = [decision.reason for decision in crowd.decisions]
    assert any(reason.startswith("rank 1 became") and "slower" in reason for reason in reasons)
    assert any(reason.startswith("rank 1 became") and "faster" in reason for reason in reasons)


@pytest.mark.parametrize("seed", range(3))
def test_noisy_equal_ranks_stay_equal(seed: int) -> None:
    crowd = Crowd.of(8)
    steps = simulate(crowd, [Rank(0.004, 0.0002)] * 8, 256, 300, noise=0.04, seed=seed)
    assert len(crowd.decisions) <= 4
    assert total(steps) < 1.02 * sum(step.optimum for step in steps)


def test_what_all_ranks_have_in_common_moves_no_shares() -> None:
    busy = slow_between(80, 160, 1.5)
    crowd = Crowd.of(5)
    steps = simulate(crowd, [Rank(0.004, 0.0002, busy)] * 5, 320, 240, seed=1)
    assert {tuple(step.shares) for step in steps[60:]} == {(64,) * 5}


def test_of_a_team_the_slowest_counts() -> None:
    """Four ranks in two teams, of whose second one rank is three times as slow."""
    crowd, source = Crowd([(0, 1), (2, 3)]), random.Random(0)
    prices = [0.001, 0.001, 0.003, 0.001]
    for step in range(60):
        sizes = crowd.shares(step, 80)
        seconds = [prices[rank] * sizes[rank // 2] * source.lognormvariate(0, 0.02) for rank in range(4)]
        crowd.observe(step, sizes, seconds)
    assert crowd.shares(60, 80)[0] == pytest.approx(60, abs=4)


def test_ranks_without_a_time_say_nothing_and_the_step_is_not_compared() -> None:
    one = BySpeedOfMany(2, 0)
    assert one.voice(4, math.nan) == SpeedReport((0.0,) * BINS, (0.0, 1.0, 0.0))
    assert one.voice(0, math.nan) == SpeedReport.silent(), "an idle rank has no time"
    assert one.voice(4, 0.5).greatest == (0.5, 0.0, 0.0)
    with pytest.raises(ShareError, match="their own times alone"):
        one.observe(0, [4, 4], [1.0, 1.0])


def test_it_goes_on_with_the_lines_it_was_told() -> None:
    ranks = [Rank(0.004, 0.0001), *[Rank(0.004, 0.0003)] * 3]
    crowd = Crowd.of(4)
    simulate(crowd, ranks, 256, 60)
    state = json.loads(json.dumps(crowd.ranks[2].state_dict()))
    resumed = Crowd.of(4)
    for each in resumed.ranks:
        each.load_state_dict(state)
    first = resumed.shares(60, 256)
    assert first[0] > 1.8 * first[1]
    late = simulate(resumed, ranks, 256, 60, first=60)[-20:]
    assert total(late) < 1.05 * sum(step.optimum for step in late)
    for strange in ({"models": []}, BySpeed(4).state_dict()):
        fresh = BySpeedOfMany(4, 1)
        fresh.load_state_dict(strange)
        assert fresh.shares(0, 8) == [2, 2, 2, 2]
    few = BySpeed(4)
    few.load_state_dict(state)
    assert few.shares(0, 8) == [2, 2, 2, 2]


# Shares by arrays


def made_up(source: random.Random, ranks: int) -> tuple[tuple[Line, ...], Lines]:
    """Lines with cliffs; half of the time of few kinds, so that many times are equal."""
    few = source.random() < 0.5
    lines = []
    for _ in range(ranks):
        overhead = source.choice([0.0, 0.001, 0.002]) if few else 0.01 * source.random()
        price = source.choice([0.001, 0.002, 0.0005]) if few else 0.001 * source.random() + 1e-5
        cliffs = (
            {}
            if few
            else {source.randrange(1, 60): 0.1 * source.random() for _ in range(source.randrange(3))}
        )
        lines.append(Line(overhead, price, tuple(sorted(cliffs.items()))))
    pairs = [[*line.cliffs, (math.inf, 0.0), (math.inf, 0.0)][:2] for line in lines]
    cliffs_of_all = tuple(
        (np.array([pair[at][0] for pair in pairs], float), np.array([pair[at][1] for pair in pairs]))
        for at in (0, 1)
    )
    straight = np.array([(line.overhead_seconds, line.seconds_per_sample) for line in lines])
    return tuple(lines), Lines(straight[:, 0], straight[:, 1], cliffs_of_all)


@pytest.mark.parametrize("seed", range(150))
def test_arrays_divide_as_lines_one_by_one(seed: int) -> None:
    source = random.Random(seed)
    ranks = source.choice([1, 2, 3, 7, 20, 70])
    lines, arrays = made_up(source, ranks)
    batch_size, share_multiple_of = (
        source.choice([0, 1, ranks, 3 * ranks + 1, 50 * ranks + 5]),
        source.choice([1, 1, 4, 8]),
    )
    max_shares = [
        None if source.random() < 0.8 else source.randrange(3 * batch_size // ranks + 5) for _ in range(ranks)
    ]
    few, many = Division(lines), DivisionOfMany(arrays)
    if source.random() < 0.5:
        old = [source.randrange(40) for _ in range(ranks)]
        few, many = few.near(old), many.near(old)
    shares = []
    for division in (few, many):
        try:
            shares.append(division(batch_size, max_shares, share_multiple_of, seed % 2))
        except ShareError as error:
            shares.append(str(error))  # type: ignore[arg-type]
    assert shares[0] == shares[1]
    if isinstance(shares[0], list):
        assert many.slowest(shares[0]) == few.slowest(shares[0])
        assert many.seconds(ranks - 1, 17) == few.seconds(ranks - 1, 17)
    assert many.values() == few.values()


def test_ties_go_to_the_lower_rank() -> None:
    lines = Lines.even(5)
    assert DivisionOfMany(lines)(7, [None] * 5, 1) == solve([float] * 5, 7) == [2, 2, 1, 1, 1]


def test_a_step_costs_as_much_python_whatever_the_number_of_ranks() -> None:
    """Without a look, and with one."""

    def lines_run(ranks: int) -> int:
        one, source = BySpeedOfMany(ranks, 3), np.random.default_rng(0)
        ran, counts = 0, [0.0] * BINS
        counts[BINS // 2] = float(ranks)

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal ran
            ran += event == "line"
            return trace

        for step in range(40):
            sizes = one.shares(step, 32 * ranks)
            rows = [one.line()] * ranks if one.asks else []
            sys.settrace(trace if step == 30 or (rows and step > 30) else None)
            try:
                one.voice(sizes[3], 0.01)
                one.hear(
                    step,
                    sizes,
                    0.01 * source.lognormal(0, 0.01),
                    SpeedReport(tuple(counts), (0.01, 0.0, 0.0)),
                    rows,
                )
            finally:
                sys.settrace(None)
        return ran

    assert lines_run(4096) < 1.5 * lines_run(128)
