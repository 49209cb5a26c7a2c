from __future__ import annotations

import json
import math
import random

import pytest

from evener.balance.base import Equal
from evener.balance.by_speed import BySpeed
from evener.balance.policy import Policy
from evener.errors import ConfigurationError, ShareError
from tests.balance.simulator import Rank, Step, simulate, slow_between
from tests.tiers import ALWAYS, NIGHTLY, spread

RESTING = Policy(placeholder=0)
"""Of ranks that compute nothing where they have no share."""


def total(steps: list[Step]) -> float:
    return sum(step.seconds for step in steps)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ratio", [2, 3, 4])
@pytest.mark.parametrize("overhead", [0.0, 0.005])
def test_unequal_ranks_end_within_5_percent_of_the_optimum(ratio: int, overhead: float, seed: int) -> None:
    ranks = [Rank(overhead, 0.0002), Rank(overhead * ratio, 0.0002 * ratio)]
    steps = simulate(BySpeed(2), ranks, 128, 200, seed=seed)
    late = steps[40:]
    assert total(late) < 1.05 * sum(step.optimum for step in late)


@pytest.mark.parametrize("seed", range(5))
def test_many_unequal_ranks_with_overheads_end_within_5_percent(seed: int) -> None:
    ranks = [Rank(0.005, 0.0001 * slow) for slow in (1, 1, 2, 2, 3, 4, 1.5, 2.5)]
    late = simulate(BySpeed(8), ranks, 512, 200, seed=seed)[60:]
    assert total(late) < 1.05 * sum(step.optimum for step in late)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lookahead", [0, 2, 4])
def test_a_slowdown_is_followed_within_20_steps_and_so_is_its_end(lookahead: int, seed: int) -> None:
    ranks = [Rank(0.004, 0.0002), Rank(0.004, 0.0002, slow_between(100, 200, 2)), Rank(0.004, 0.0002)]
    steps = simulate(BySpeed(3, lookahead=lookahead), ranks, 192, 300, seed=seed, lookahead=lookahead)
    for begin, end in ((50, 100), (120, 200), (220, 300)):
        assert max(step.excess for step in steps[begin:end]) < 0.10


@pytest.mark.parametrize("seed", spread(range(8), ALWAYS, NIGHTLY, NIGHTLY, NIGHTLY))
@pytest.mark.parametrize(("world_size", "noise"), [(2, 0.02), (4, 0.05), (8, 0.1)])
def test_noisy_equal_ranks_stay_equal(world_size: int, noise: float, seed: int) -> None:
    ranks = [Rank(0.004, 0.0002)] * world_size
    auto = BySpeed(world_size)
    ours = total(simulate(auto, ranks, 32 * world_size, 500, noise=noise, seed=seed))
    equal = total(simulate(Equal(world_size), ranks, 32 * world_size, 500, noise=noise, seed=seed))
    assert len(auto.decisions) <= 4
    assert ours < (1 + max(0.01, noise / 3)) * equal


def test_single_slow_steps_do_not_move_the_shares() -> None:
    auto = BySpeed(4)
    simulate(auto, [Rank(0.004, 0.0002)] * 4, 128, 500, noise=0.02, spikes=0.05)
    assert len(auto.decisions) <= 3


def test_a_rank_that_became_useless_is_idle_probed_cheaply_and_found_when_it_recovers() -> None:
    ranks = [Rank(0.002, 0.0002), Rank(0.002, 0.0002, slow_between(60, 400, 40))]
    auto = BySpeed(2, policy=RESTING)
    steps = simulate(auto, ranks, 64, 900)
    idle = steps[100:400]
    assert min(step.shares[1] for step in idle) == 0
    assert total(idle) < 1.05 * sum(step.optimum for step in idle)
    assert max(step.excess for step in steps[-50:]) < 0.10


def test_a_rank_whose_placeholder_costs_a_sample_gets_one() -> None:
    """Most of the step of the last is what each step costs it, and a share of 0 would save nothing."""
    ranks = [Rank(0.001, 0.0001), Rank(0.002, 0.0002), Rank(0.04, 0.0004)]
    late = simulate(BySpeed(3), ranks, 64, 100)[-50:]
    assert min(step.shares[2] for step in late) == 1
    assert (
        min(min(step.shares) for step in simulate(BySpeed(3, share_multiple_of=8), ranks, 64, 60)[-20:]) == 0
    )
    assert min(min(step.shares) for step in simulate(BySpeed(3), ranks, 2, 60)[-20:]) == 0


def test_a_rank_left_out_by_a_small_batch_is_tried_and_taken_in() -> None:
    ranks = [Rank(0.002, 0.002), Rank(0.002, 0.002), Rank(0.0002, 0.0002)]
    late = simulate(BySpeed(3), ranks, 2, 300)[-50:]
    assert late[-1].shares == [0, 0, 2]
    assert total(late) < 1.3 * sum(step.optimum for step in late)


def test_decisions_are_records_with_their_reason() -> None:
    auto = BySpeed(2, lookahead=3)
    ranks = [Rank(0.002, 0.0002), Rank(0.002, 0.0002, slow_between(50, 500, 2))]
    steps = simulate(auto, ranks, 96, 100, lookahead=3)
    first = auto.decisions[0]
    assert 50 <= first.step < 60
    assert first.effective_step == first.step + 4
    assert first.old_shares == (48, 48)
    assert first.seconds_after < first.seconds_before
    assert "rank 1 became" in first.reason
    assert "slower" in first.reason
    assert tuple(steps[first.effective_step - 1].shares) == first.old_shares
    assert tuple(steps[first.effective_step].shares) == first.new_shares


def test_ranks_agree_without_a_message_however_often_they_ask() -> None:
    quiet, curious = BySpeed(3), BySpeed(3)
    source = random.Random(5)
    for step in range(120):
        ahead = [step + 2, step, step + 1] if step else [0, 1, 2]
        assert [curious.shares(each, 100) for each in ahead] == [quiet.shares(each, 100) for each in ahead]
        curious.state_dict()
        assert all(model.predict(50) > 0 for model in curious.models if model.known)
        assert sum(curious.shares(step, 37)) == 37
        sizes = quiet.shares(step, 100)
        seconds = [n * source.uniform(0.9, 1.1) * (rank + 1) for rank, n in enumerate(sizes)]
        quiet.observe(step, sizes, seconds)
        curious.observe(step, sizes, seconds)
    assert quiet.decisions == curious.decisions != ()


def test_the_calibration_varies_every_share_and_every_batch_adds_up() -> None:
    steps = simulate(BySpeed(3), [Rank(0.002, 0.0002)] * 3, lambda step: 7 if step % 10 == 9 else 96, 40)
    for rank in range(3):
        assert len({step.shares[rank] for step in steps[2:8]}) == 2
    assert all(step.shares == [32, 32, 32] for step in steps[:2])


def test_short_last_batches_and_gaps_in_the_times_do_no_harm() -> None:
    ranks = [Rank(0.004, 0.0002), Rank(0.004, 0.0008)]
    auto = BySpeed(2)
    late = simulate(auto, ranks, lambda step: 40 if step % 8 == 7 else 128, 100)[40:]
    assert max(step.excess for step in late if sum(step.shares) == 128) < 0.05
    assert {sum(decision.old_shares) for decision in auto.decisions} == {128}
    auto.observe(100, [0, 0], [math.nan, 0.0])
    assert sum(auto.shares(101, 128)) == 128


def test_limits_hold_at_every_step() -> None:
    ranks = [Rank(0.002, 0.0001), Rank(0.002, 0.0003), Rank(0.002, 0.0003)]
    steps = simulate(BySpeed(3, max_shares=[48, None, None], share_multiple_of=8), ranks, 96, 80)
    assert all(step.shares[0] <= 48 and all(n % 8 == 0 for n in step.shares) for step in steps)
    assert steps[-1].shares == [48, 24, 24]


def test_one_rank_takes_all() -> None:
    auto = BySpeed(1)
    assert all(step.shares == [32] for step in simulate(auto, [Rank(0.002, 0.0002)], 32, 30))
    assert not auto.decisions


def test_a_step_that_is_not_settled_or_is_over_is_refused() -> None:
    auto = BySpeed(2, lookahead=1)
    auto.shares(100, 8)
    auto.shares(101, 8)
    with pytest.raises(ValueError, match="steps 100 to 101 are settled"):
        auto.shares(102, 8)
    with pytest.raises(ValueError, match="shares of step 99"):
        auto.shares(99, 8)
    auto.observe(100, [4, 4], [1.0, 1.0])
    assert sum(auto.shares(102, 8)) == 8


def test_a_copy_through_json_goes_on_with_the_same_shares_from_any_step() -> None:
    ranks = [Rank(0.004, 0.0002), Rank(0.004, 0.0005, slow_between(30, 50, 2)), Rank(1.0, 1.0)]
    source, whole = random.Random(1), BySpeed(3, policy=RESTING)
    states, shares, seen = [], [whole.shares(0, 128), whole.shares(1, 128)], []
    for step in range(80):
        shares.append(whole.shares(step + 2, 128))
        seen.append(
            [
                r.seconds(step, n) * source.lognormvariate(0, 0.05)
                for r, n in zip(ranks, shares[step], strict=True)
            ]
        )
        whole.observe(step, shares[step], seen[step])
        states.append(json.dumps(whole.state_dict()))
    assert len(whole.decisions) >= 3
    kept = [json.loads(state) for state in states]
    assert any(state["trial"] for state in kept)
    assert any(state["check"] for state in kept)
    for start, state in enumerate(states[:-12]):
        resumed = BySpeed(3, policy=RESTING)
        resumed.load_state_dict(json.loads(state))
        for step in range(start + 1, start + 12):
            resumed.observe(step, shares[step], seen[step])
            assert resumed.shares(step + 2, 128) == shares[step + 2]
            assert json.dumps(resumed.state_dict()) == states[step]


def test_another_world_size_takes_over_what_it_can() -> None:
    fast, slow = Rank(0.004, 0.0002), Rank(0.004, 0.0008)
    auto, smaller = BySpeed(3), BySpeed(2)
    simulate(auto, [fast, slow, fast], 128, 80)
    smaller.load_state_dict(auto.state_dict())
    assert max(step.excess for step in simulate(smaller, [fast, slow], 128, 2, first=80)) < 0.10


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="world_size 0"):
        BySpeed(0)
    with pytest.raises(ShareError, match="1 max_shares"):
        BySpeed(2, max_shares=[4])
    with pytest.raises(ShareError, match="add up to 8"):
        BySpeed(2, max_shares=[4, 4]).shares(0, 9)
    with pytest.raises(ShareError, match="2 ranks"):
        BySpeed(2).observe(0, [4, 4, 4], [1.0, 1.0, 1.0])


class Contended(Rank):
    """A rank that is slower by a third where it has more samples than the calibration gave it."""

    def seconds(self, step: int, n: int) -> float:
        return super().seconds(step, n) * (1.35 if n > 72 else 1.0)


def test_a_change_that_did_not_pay_is_taken_back_and_makes_the_next_one_harder() -> None:
    ranks = [Contended(0.001, 0.0002), Rank(0.001, 0.0003)]
    auto = BySpeed(2, policy=Policy(calibration_spread=0.1))
    steps = simulate(auto, ranks, 128, 200, noise=0.01)
    first, second, *_ = auto.decisions
    assert first.reason.startswith("ranks differ in speed: ")
    assert second.reason.startswith("taken back: steps were ")
    assert " longer, not " in second.reason
    assert second.new_shares == first.old_shares
    assert len(auto.decisions) <= 5
    assert not [decision for decision in auto.decisions if "became" in decision.reason]
    equal = simulate(Equal(2), ranks, 128, 200)
    assert total(steps[60:]) < 1.02 * total(equal[60:])


def test_a_small_gain_is_tried_in_turns_before_it_is_kept() -> None:
    ranks = [Rank(0.004, 0.0002), Rank(0.004, 0.00023)]
    auto = BySpeed(2)
    steps = simulate(auto, ranks, 192, 200, noise=0.01)
    first = auto.decisions[0]
    assert "in a trial, steps were" in first.reason
    tried = [tuple(step.shares) == first.new_shares for step in steps[8 : first.effective_step]]
    assert 4 <= sum(tried) <= len(tried) - 4
    assert all(tuple(step.shares) == first.new_shares for step in steps[first.effective_step :][:8])


def test_a_trial_of_a_rank_that_changes_its_speed_ends() -> None:
    ranks = [Rank(0.004, 0.0002), Rank(0.004, 0.00023, slow_between(14, 500, 2))]
    auto = BySpeed(2)
    simulate(auto, ranks, 192, 60, noise=0.01)
    assert "rank 1 became" in auto.decisions[0].reason
    assert auto.decisions[0].step < 28


@pytest.mark.parametrize(("price", "tried"), [(0.00023, True), (0.0006, False)])
def test_shares_that_are_not_surely_better_are_tried_against_equal_ones(price: float, tried: bool) -> None:
    auto = BySpeed(2, policy=Policy(equal_steps=20))
    steps = simulate(auto, [Rank(0.004, 0.0002), Rank(0.004, price)], 192, 150, noise=0.01)
    begin = auto.decisions[0].effective_step
    equal = [step for step, done in enumerate(steps) if step >= begin and done.shares == [96, 96]]
    assert bool(equal) is tried
    assert steps[-1].shares != [96, 96], "they were better after all"
