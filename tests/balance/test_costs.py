"""Balancers of samples whose costs are very unequal, at virtual times: nobody's clock is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from evener.balance.base import Balancer, Equal
from evener.balance.by_speed import BySpeed
from evener.balance.by_speed_large import BINS, BySpeedOfMany
from evener.balance.speed import SIZE_RATIO, SpeedModel
from evener.balance.trial import DivisionComparison
from evener.data.costs import costs_of, divide_by_cost
from tests.balance.simulator import Rank, slow_between
from tests.balance.test_by_speed_large import Crowd, together
from tests.balancers import Recorder

LOOKAHEAD = 2


def waited(
    balancer: Balancer, ranks: Sequence[Rank], by_cost: bool, steps: int = 120, size: int = 64, seed: int = 0
) -> list[float]:
    """For each step, how much longer it took than if samples could be cut anywhere, relative to that time.

    A rank takes ``overhead + price * cost`` seconds, and costs are lognormal: one in twenty is above five times the
    median.
    """
    source = np.random.default_rng(seed)
    costs = source.lognormal(0, 1, (steps + LOOKAHEAD, size))
    costs /= costs.mean()
    prefetched: dict[int, tuple[list[int], np.ndarray[Any, Any]]] = {}
    found = []
    for step in range(steps):
        for ahead in range(step, step + LOOKAHEAD + 1):
            if ahead not in prefetched and ahead < steps:
                shares = balancer.shares(ahead, size)
                fractions = balancer.fractions(ahead, size)
                counts = divide_by_cost(costs[ahead], fractions, shares) if by_cost else np.array([shares])
                prefetched[ahead] = shares, costs_of(costs[ahead], counts)
        shares, taken = prefetched.pop(step)
        seconds = [rank.seconds(step, cost) for rank, cost in zip(ranks, taken.tolist(), strict=True)]  # type: ignore[arg-type]
        seen = (np.array(seconds) * source.lognormal(0, 0.03, len(ranks))).tolist()
        slow = [rank.slowness(step) for rank in ranks]
        overheads = sum(rank.overhead / rank.price for rank in ranks)
        best = (costs[step].sum() + overheads) / sum(
            1 / (rank.price * factor) for rank, factor in zip(ranks, slow, strict=True)
        )
        found.append(max(seconds) / best - 1)
        if by_cost:
            balancer.observe_costs(step, shares, taken.tolist(), seen)
        else:
            balancer.observe(step, shares, seen)
    return found


EQUAL, UNEQUAL = [Rank(0.002, 0.001)] * 2, [Rank(0.002, 0.001), Rank(0.004, 0.002)]


class CostCrowd(Crowd):
    """As `Crowd`, told costs."""

    def observe_costs(
        self, step: int, sizes: Sequence[int], costs: Sequence[float], seconds: Sequence[float]
    ) -> None:
        (asks,) = {each.asks for each in self.ranks}
        lines = [each.line() for each in self.ranks] if asks else []
        told = [(each, self.part_of[rank]) for rank, each in enumerate(self.ranks)]
        reduced = together([each.voice(sizes[part], seconds[part], costs[part]) for each, part in told])
        for each, part in told:
            each.hear(step, sizes, seconds[part], reduced, lines, costs[part])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("made", "ranks"),
    [
        (lambda: Equal(2), EQUAL),
        (lambda: BySpeed(2, lookahead=LOOKAHEAD), EQUAL),
        (lambda: BySpeed(2, lookahead=LOOKAHEAD), UNEQUAL),
        (lambda: CostCrowd.of(4, lookahead=LOOKAHEAD), UNEQUAL * 2),
    ],
    ids=["equal", "auto", "auto of unequal ranks", "auto of many"],
)
def test_ranks_wait_with_shares_by_samples_and_not_with_shares_by_cost(
    made: Callable[[], Balancer], ranks: Sequence[Rank], seed: int
) -> None:
    by_samples, by_cost = (np.mean(waited(made(), ranks, costs, seed=seed)[40:]) for costs in (False, True))
    assert by_cost < 0.04 * len(ranks)
    assert by_samples > 2.5 * by_cost


def test_equal_ranks_stay_equal_however_costs_fall() -> None:
    balancer = BySpeed(2, lookahead=LOOKAHEAD)
    waited(balancer, EQUAL, by_cost=True, steps=200)
    assert len(balancer.decisions) <= 1
    assert balancer.shares(200, 64) == pytest.approx([32, 32], abs=3)


def test_a_slowdown_is_followed_and_so_is_its_end() -> None:
    balancer = BySpeed(2, lookahead=LOOKAHEAD)
    late = waited(balancer, [EQUAL[0], Rank(0.002, 0.001, slow_between(80, 160, 2))], by_cost=True, steps=240)
    assert np.mean(late[100:160]) < 0.08
    assert np.mean(late[180:]) < 0.08
    reasons = [decision.reason for decision in balancer.decisions]
    assert any("rank 1 became" in reason and "slower" in reason for reason in reasons)
    assert any("rank 1 became" in reason and "faster" in reason for reason in reasons)


@pytest.mark.parametrize("seed", range(3))
def test_lines_are_learned_from_costs_as_they_were(seed: int) -> None:
    """The overhead is that of 20 and of 10 samples of mean cost; with shares for costs it may come out as 5 or 30."""
    balancer = BySpeed(2, lookahead=LOOKAHEAD)
    waited(balancer, [Rank(0.02, 0.001), Rank(0.02, 0.002)], by_cost=True, steps=100, seed=seed)
    lines = [model.fit().line for model in balancer.models]
    assert [line.overhead_seconds / line.seconds_per_sample for line in lines] == pytest.approx(
        [20, 10], rel=0.25
    )


def test_steps_are_compared_as_if_their_shares_were_their_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs alone make these steps differ by a tenth."""
    compared: dict[tuple[int, ...], list[float]] = {}
    add = DivisionComparison.add

    def noted(self: DivisionComparison, sizes: Sequence[int], seconds: float) -> None:
        compared.setdefault(tuple(sizes), []).append(math.log(seconds))
        add(self, sizes, seconds)

    monkeypatch.setattr(DivisionComparison, "add", noted)
    apart = []
    for seed in range(6):
        compared.clear()
        balancer = BySpeed(2, lookahead=LOOKAHEAD)
        waited(balancer, [Rank(0.002, 0.001), Rank(0.002, 0.0012)], by_cost=True, steps=60, seed=seed)
        apart += [time - np.mean(logs) for logs in compared.values() for time in logs]
    assert len(apart) > 40
    assert np.std(apart) < 0.05


def test_of_many_a_rank_reports_its_time_against_its_line_of_costs() -> None:
    balancer = BySpeedOfMany(2, 0, lookahead=LOOKAHEAD)
    for step in range(30):
        cost = 20.0 + step % 7
        seconds = 0.01 + 0.001 * cost
        report = balancer.voice(30, seconds, cost)
        balancer.hear(step, balancer.shares(step, 60), seconds, together([report] * 2), (), cost)
        balancer.asks = False
    report = balancer.voice(30, 0.01 + 0.001 * 25, 25.0)
    assert report.added.index(1.0) in (BINS // 2 - 1, BINS // 2), "as its line says"
    assert report.greatest[0] == pytest.approx(0.01 + 0.001 * 30, rel=0.02)


def test_state_with_costs_is_restored_exactly() -> None:
    balancer, other = BySpeed(2, lookahead=LOOKAHEAD), BySpeed(2, lookahead=LOOKAHEAD)
    waited(balancer, UNEQUAL, by_cost=True, steps=50)
    other.load_state_dict(balancer.state_dict())
    assert other.state_dict() == balancer.state_dict()
    for step in range(50, 60):
        for each in (balancer, other):
            each.observe_costs(step, each.shares(step, 64), [30.0 + step, 20.0], [0.034, 0.046])
    assert other.state_dict() == balancer.state_dict()
    assert other.shares(60, 64) == balancer.shares(60, 64)


def test_a_model_of_costs_learns_the_line() -> None:
    model, source = SpeedModel(), np.random.default_rng(0)
    for cost in source.uniform(20, 60, 100):
        model.observe_cost(cost, 0.01 + 0.001 * cost)
    line = model.fit().line
    assert (line.overhead_seconds, line.seconds_per_sample) == pytest.approx((0.01, 0.001), rel=0.05)
    assert model.moved(0.03, 20.0, 40.0) == pytest.approx(0.05, rel=0.02)
    assert len(model.state_dict()["sizes"]) == 12
    assert model.observe_cost(0.0, 1.0) is None
    first, second = (size for size, *_ in sorted(model.state_dict()["sizes"])[:2])
    assert second / first == pytest.approx(SIZE_RATIO)


def test_another_balancer_gets_times_in_proportion_to_its_shares() -> None:
    balancer = Recorder(2)
    balancer.observe_costs(3, [6, 2], [3.0, 4.0], [1.0, 2.0])
    assert list(balancer.observed) == [(3, (6, 2), (2.0, 1.0))]
