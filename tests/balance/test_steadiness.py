"""What nobody may regret: learned shares against the best fixed ones, in the weather that real machines have."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from functools import cache

import pytest

from evener.balance.base import Balancer, Equal
from evener.balance.by_speed import BySpeed
from evener.core.config.exact_bits import ExactBits
from evener.data.grains import in_whole_blocks, padded
from tests.balance.simulator import Rank, slow_between
from tests.balance.weather import BUSY, CALM, STORM, USUAL, Weather, best, lived
from tests.tiers import ALWAYS, NIGHTLY, crossed

USUAL_RANK = Rank(0.004, 0.0002)


def slower(times: float) -> Rank:
    return Rank(USUAL_RANK.overhead * times, USUAL_RANK.price * times)


@cache
def runs(
    ranks: tuple[Rank, ...], weather: Weather, seeds: int, lookahead: int = 2
) -> list[tuple[list[float], list[float], BySpeed]]:
    """Of each seed the times of 500 steps with learned shares, and with those that are the best at first."""
    batch_size, found = 96 * len(ranks), []
    for seed in range(seeds):
        factors, auto = weather.factors(len(ranks), 500, seed), BySpeed(len(ranks), lookahead=lookahead)
        reference: Balancer = Equal(len(ranks)) if ranks[1:] == ranks[:-1] else best(ranks, batch_size)
        ours = lived(auto, ranks, factors, batch_size, lookahead)
        found.append((ours, lived(reference, ranks, factors, batch_size), auto))
    return found


def ratios(
    found: list[tuple[list[float], list[float], BySpeed]], first: int = 0, end: int = 500
) -> list[float]:
    return [sum(ours[first:end]) / sum(reference[first:end]) for ours, reference, _ in found]


WEATHERS = {"calm": CALM, "usual": USUAL, "busy": BUSY, "storm": STORM}


@pytest.mark.parametrize(("world_size", "name"), crossed([2, 4], list(WEATHERS), lambda _: (ALWAYS, NIGHTLY)))
def test_equal_ranks_lose_nothing(world_size: int, name: str) -> None:
    weather = WEATHERS[name]
    found = ratios(runs((USUAL_RANK,) * world_size, weather, 10))
    assert statistics.median(found) < (1.015 if weather is STORM else 1.01)
    assert max(found) < (1.05 if weather is STORM else 1.03)


def test_equal_ranks_seldom_change() -> None:
    for world_size in (2, 4):
        changes = [len(auto.decisions) for *_, auto in runs((USUAL_RANK,) * world_size, USUAL, 10)]
        assert statistics.mean(changes) < 3


@pytest.mark.parametrize("times", [2, 3, 4])
def test_unequal_ranks_reach_the_optimum(times: int) -> None:
    for weather in (CALM, USUAL):
        found = runs((USUAL_RANK, slower(times)), weather, 5)
        assert statistics.median(ratios(found, 60)) < 1.015
        assert max(ratios(found, 60)) < 1.03


def test_a_constant_throttle_is_no_change_of_speed_and_leaves_nobody_idle() -> None:
    for times in (2, 3, 4):
        for weather in (CALM, USUAL):
            for *_, auto in runs((USUAL_RANK, slower(times)), weather, 5):
                assert auto.decisions
                assert not [decision.reason for decision in auto.decisions if "became" in decision.reason]
                assert all(min(decision.new_shares) > 0 for decision in auto.decisions)


def test_sixteen_ranks_of_all_speeds_reach_the_optimum() -> None:
    ranks = tuple(slower(1 + 3 * rank / 15) for rank in range(16))
    assert max(ratios(runs(ranks, USUAL, 3), 60)) < 1.03


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("lookahead", [2, 4])
def test_a_slowdown_is_followed_within_12_steps_and_so_is_its_end(lookahead: int, others: int) -> None:
    sane = (USUAL_RANK,) * others
    ranks = (*sane, Rank(USUAL_RANK.overhead, USUAL_RANK.price, slow_between(200, 300, 2)))
    found = runs(ranks, CALM, 5, lookahead)
    for (ours, _, auto), seed in zip(found, range(5), strict=True):
        factors = CALM.factors(len(ranks), 500, seed)
        slowed = lived(best(ranks, 96 * len(ranks), 250), ranks, factors, 96 * len(ranks))
        equal = lived(Equal(len(ranks)), ranks, factors, 96 * len(ranks))
        assert sum(ours[212:300]) < 1.05 * sum(slowed[212:300])
        assert sum(ours[340:]) < 1.02 * sum(equal[340:])
        reasons = [decision.reason for decision in auto.decisions if "became" in decision.reason]
        assert len(reasons) == 2
        assert f"rank {others} became" in reasons[0]
        assert f"rank {others} became" in reasons[1]
        assert "slower" in reasons[0]
        assert "faster" in reasons[1]
        assert reasons[0].count("became") == 1, "only one rank has changed"


def test_a_busy_host_moves_nothing() -> None:
    slow = slow_between(100, 200, 2.5)
    ranks = tuple(Rank(USUAL_RANK.overhead, USUAL_RANK.price, slow) for _ in range(2))
    for *_, auto in runs(ranks, USUAL, 5):
        found = [decision for decision in auto.decisions if 100 <= decision.step < 240]
        assert not [decision for decision in found if "became" in decision.reason]
        assert all(max(decision.new_shares) < 110 for decision in found)


@pytest.mark.parametrize("times", [1, 3])
def test_shares_in_whole_blocks_are_learned_and_stay(times: int) -> None:
    """The balancer is asked for whole blocks, and learns from the shares of a batch whose last block is smaller."""
    bits, size, draws = ExactBits(4), 62, random.Random(0)
    ranks, auto, found = (USUAL_RANK, slower(times)), BySpeed(2, share_multiple_of=bits.block), []

    def seconds(shares: Sequence[int]) -> list[float]:
        return [rank.seconds(0, n) for rank, n in zip(ranks, shares, strict=True)]

    for step in range(400):
        shares = in_whole_blocks(bits, size, auto.shares(step, padded(bits, size)))
        auto.observe(step, shares, [time * draws.gauss(1, 0.02) for time in seconds(shares)])
        found.append(max(seconds(shares)))
    optimum = min(max(seconds((first, size - first))) for first in (*range(0, size, bits.block), size))
    assert statistics.mean(found[100:]) <= 1.02 * optimum
    assert len(auto.decisions) <= 3
