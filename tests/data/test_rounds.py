"""Rounds of local steps: who trains on what, and when it merges."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evener.data.rounds import LocalBatch, RoundPlan, Rounds, carried_by


def plans(
    replicas: int,
    ranks: int,
    sync_every: int,
    batch_size: int,
    shares: tuple[int, ...],
    done: int = 0,
    **options: int,
) -> list[RoundPlan]:
    """The plan of each rank."""
    return [
        Rounds(replicas, sync_every, batch_size, rank, ranks, **options).plan(shares, done)
        for rank in range(ranks)
    ]


def drawn(plan: RoundPlan) -> str:
    """The passes of a plan as their lengths, a line for each replica, a bar for each segment."""
    replicas = sorted({each.replica for segment in plan.segments for each in segment.local})
    return "\n".join(
        " | ".join(
            " ".join(str(sum(map(len, each.passes))) for each in segment.local if each.replica == replica)
            for segment in plan.segments
        )
        for replica in replicas
    )


def test_a_larger_share_is_more_steps_of_the_usual_size() -> None:
    (plan,) = plans(2, 1, 4, 8, (24, 8), fragments=2)
    assert drawn(plan) == "4 4 4 | 4 4 4\n4 | 4"
    assert [segment.merged for segment in plan.segments] == [(0,), (1,)]
    assert [segment.sent for segment in plan.segments] == [(0,), (1,)]


def test_a_fragment_is_sent_before_it_merges() -> None:
    (plan,) = plans(1, 1, 6, 2, (12,), fragments=2, delay=1)
    assert drawn(plan) == "2 2 | 2 | 2 2 | 2"
    assert [(segment.sent, segment.merged) for segment in plan.segments] == [
        ((0,), ()),
        ((), (0,)),
        ((1,), ()),
        ((), (1,)),
    ]


def test_a_round_that_is_cut_short_sends_nothing_ahead() -> None:
    (plan,) = plans(1, 1, 6, 2, (7,), fragments=2, delay=1)
    assert [(segment.sent, segment.merged) for segment in plan.segments] == [((0,), (0,)), ((1,), (1,))]


def test_one_replica_takes_the_batches_of_one_device() -> None:
    (plan,) = plans(1, 1, 4, 24, (92,))
    assert drawn(plan) == "24 24 24 20"
    (plan,) = plans(1, 1, 5, 24, (100,))
    assert drawn(plan) == "24 24 24 24 4"


def test_a_round_of_one_batch_is_one_step_whatever_the_shares() -> None:
    (plan,) = plans(2, 1, 1, 24, (18, 6))
    assert drawn(plan) == "18\n6"


def test_warm_up_is_taken_together_and_counts_from_the_start_of_the_training() -> None:
    (plan,) = plans(2, 1, 4, 8, (24, 8), done=32, warmup_steps=6)
    assert [[sum(map(len, each.passes)) for each in step] for step in plan.together] == [[6, 2], [6, 2]]
    assert drawn(plan) == "4 4 4\n4"
    (plan,) = plans(2, 1, 4, 8, (24, 8), done=0, warmup_steps=6)
    assert len(plan.together) == 4
    assert plan.segments == ()


def test_a_micro_batch_is_divided_over_the_replicas() -> None:
    (plan,) = plans(2, 1, 1, 16, (8, 8), micro_batch=6)
    assert [list(map(len, each.passes)) for segment in plan.segments for each in segment.local] == [
        [3, 3, 2]
    ] * 2


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[RoundPlan], tuple[int, ...], int]:
    replicas = draw(st.integers(1, 6))
    ranks = draw(st.integers(1, replicas))
    sync_every, batch_size = draw(st.integers(1, 12)), draw(st.integers(1, 40))
    shares = tuple(draw(st.lists(st.integers(0, 3 * batch_size), min_size=replicas, max_size=replicas)))
    fragments = draw(st.integers(1, sync_every))
    options = {
        "fragments": fragments,
        "delay": draw(st.integers(0, (sync_every - 1) // fragments)),
        "warmup_steps": draw(st.integers(0, 20)),
        "micro_batch": draw(st.integers(1, 50)),
    }
    if not sum(shares):
        shares = (1, *shares[1:])
    done = draw(st.integers(0, 400))
    if options["delay"] * fragments >= sync_every:
        options["delay"] = 0
    return plans(replicas, ranks, sync_every, batch_size, shares, done, **options), shares, fragments


@given(rounds())
def test_each_sample_is_trained_on_once_and_each_fragment_merges_once(
    found: tuple[list[RoundPlan], tuple[int, ...], int],
) -> None:
    of_ranks, shares, fragments = found
    assert sorted(at for plan in of_ranks for each in plan.passes for at in each) == list(range(sum(shares)))
    for plan in of_ranks:
        local = [each for segment in plan.segments for each in segment.local]
        assert all(each for batch in local for each in batch.passes)
        assert all(batch.passes for batch in local)
        sent = [fragment for segment in plan.segments for fragment in segment.sent]
        merged = [fragment for segment in plan.segments for fragment in segment.merged]
        assert sent == merged == (list(range(fragments)) if plan.segments else [])
        assert plan.segments or plan.together
        _check_schedule(plan, local)


def _check_schedule(plan: RoundPlan, local: list[LocalBatch]) -> None:
    """Each replica goes through its own samples in order, and its schedule to the end of the round."""
    for replica in {each.replica for each in local}:
        own = [each for each in local if each.replica == replica]
        assert own[-1].batches == plan.batches
        for one, other in pairwise(own):
            assert one.batches <= other.batches
            assert one.passes[-1].stop == other.passes[0].start


@given(rounds())
def test_all_ranks_meet_at_the_same_moments(found: tuple[list[RoundPlan], tuple[int, ...], int]) -> None:
    moments = [
        (len(plan.together), [(segment.sent, segment.merged) for segment in plan.segments])
        for plan in found[0]
    ]
    assert all(each == moments[0] for each in moments)


def test_each_rank_carries_replicas_that_follow_each_other() -> None:
    assert [carried_by(rank, 3, 7) for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]
    assert Rounds(7, 1, 7, range(3), 3).of_ranks((1, 2, 3, 4, 5, 6, 7)) == (6, 9, 13)
