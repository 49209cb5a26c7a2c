"""Seconds of messages and all-reduces on links, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evener.tools.estimate.traffic import Message
from evener.tools.plan.cluster import Cluster, Machine, PlannedLink
from evener.tools.plan.message_times import MESSAGE_START_SECONDS, MessageTimes
from tests.tools.plan.models import FAST, SLOW, plan_card, plan_cluster

MB = 1_000_000


def seconds(kind: str, ranks: range | tuple[int, ...], nbytes: int, cluster: Cluster) -> float:
    return MessageTimes(cluster).seconds(Message(kind, tuple(ranks), nbytes))


def test_a_ring_within_a_machine() -> None:
    """Each of 2 (g - 1) rounds sends one of g pieces."""
    cluster, nbytes = plan_cluster(1, 4), 400 * MB
    one = 1e-6 + 100 * MB / 100e9
    assert seconds("all_reduce", range(4), nbytes, cluster) == pytest.approx(6 * one)
    for half in ("reduce_scatter", "all_gather", "broadcast", "all_to_all"):
        assert seconds(half, range(4), nbytes, cluster) == pytest.approx(3 * one)
    assert seconds("send", (0, 1), nbytes, cluster) == pytest.approx(1e-6 + nbytes / 100e9)


def test_a_ring_over_two_levels() -> None:
    """Between machines each rank sums its piece, and all pieces of a machine pass its connection."""
    nbytes = 400 * MB
    inside = 6 * (1e-6 + nbytes / 4 / 100e9)
    between = 4 * (50e-6 + nbytes / 3 / 1e9)
    assert seconds("all_reduce", range(12), nbytes, plan_cluster(3, 4)) == pytest.approx(inside + between)
    assert seconds("send", (3, 4), nbytes, plan_cluster(3, 4)) == pytest.approx(50e-6 + nbytes / 1e9)


def test_groups_share_the_connection_of_a_machine() -> None:
    """Tensor parallelism within machines: each of four places sums its quarter with its own place elsewhere."""
    cluster, nbytes = plan_cluster(2, 4), 400 * MB
    alone = seconds("all_reduce", (0, 1), nbytes, plan_cluster(2, 1))
    shared = seconds("all_reduce", (0, 4), nbytes, cluster)
    assert alone == pytest.approx(2 * (50e-6 + nbytes / 2 / 1e9))
    assert shared == pytest.approx(2 * (50e-6 + 4 * nbytes / 2 / 1e9))
    two_of_each = seconds("all_reduce", (0, 1, 4, 5), nbytes, cluster)
    assert two_of_each == pytest.approx(2 * (1e-6 + nbytes / 2 / 100e9) + 2 * (50e-6 + 2 * nbytes / 2 / 1e9))


def test_small_messages_cost_their_latencies() -> None:
    cluster = plan_cluster(64, 1)
    assert seconds("all_gather", range(64), 64, cluster) == pytest.approx(63 * 50e-6, rel=1e-3)


def test_nccl_takes_trees_where_rings_have_many_latencies() -> None:
    small = seconds("all_reduce", range(64), 64, plan_cluster(64, 1))
    assert small == pytest.approx(2 * 6 * 50e-6, rel=1e-3)
    two = seconds("all_reduce", range(128), 64, plan_cluster(32, 4))
    assert two == pytest.approx(2 * (3 * 1e-6 + 5 * 50e-6), rel=1e-3)
    large = 64_000 * MB
    assert seconds("all_reduce", range(64), large, plan_cluster(64, 1)) == pytest.approx(
        2 * 63 * large / 64 / 1e9, rel=1e-3
    )


def test_the_slowest_machine_of_a_group_counts() -> None:
    fast, slow = (Machine("", (plan_card(),) * 2, link, 0) for link in (FAST, SLOW))
    mixed = Cluster((fast, slow), PlannedLink(0.0, 1e15))
    expected = 2 * (50e-6 + 10 * MB / 2 / 1e9)
    assert seconds("all_reduce", range(4), 10 * MB, mixed) == pytest.approx(expected, rel=1e-3)


# All-reduces of Evener's own


def cpus(machines: int, each: int = 1) -> Cluster:
    cpu = Machine("", (replace(plan_card(), kind="cpu"),) * each, FAST, 0)
    return Cluster((cpu,) * machines, SLOW)


def summed(name: str | None, cluster: Cluster, nbytes: int) -> float:
    ranks = tuple(range(len(cluster.ranks)))
    return MessageTimes(cluster).seconds(Message("all_reduce", ranks, nbytes), name)


def test_a_ring_has_two_rounds_for_each_other_rank() -> None:
    ring = 2 * 7 * (50e-6 + 8 * MB / 8 / 1e9)
    assert summed("ring", cpus(8), 8 * MB) == pytest.approx(ring)
    assert summed(None, cpus(8), 8 * MB) == pytest.approx(ring), "gloo's"
    on_cards = summed("ring", plan_cluster(8, 1), 8 * MB)
    assert on_cards == pytest.approx(ring + 14 * MESSAGE_START_SECONDS), "whose host starts each round"


def test_trees_have_few_latencies_and_rings_few_bytes() -> None:
    for nbytes, fastest in ((1000, "tree"), (1000 * MB, "ring")):
        assert min(("ring", "tree"), key=lambda name: summed(name, cpus(16), nbytes)) == fastest
    assert summed("tree", cpus(16), 1000) < summed("ring", cpus(16), 1000) / 3


def test_leaders_of_hosts_exchange_one_sum_of_each() -> None:
    """A part is summed inside, sent around the leaders, and copied."""
    inside = 2 * 3 * (1e-6 + MB / 4 / 100e9) + 1e-6 + MB / 100e9
    between = 2 * 1 * (50e-6 + MB / 2 / 1e9)
    assert summed("two-level", cpus(2, 4), MB) == pytest.approx(inside + between)
    parts = summed("two-level", cpus(2, 4), 40 << 20)
    assert parts == pytest.approx(10 * 2 * (50e-6 + (4 << 20) / 2 / 1e9), rel=0.05), "the rest is hidden"


def test_auto_is_the_fastest_for_each_size() -> None:
    names = [None, "ring", "tree", "halving", "ring-tree", "two-level"]
    for nbytes in (1000, MB, 100 * MB):
        assert summed("auto", cpus(4, 4), nbytes) == min(summed(name, cpus(4, 4), nbytes) for name in names)


def test_there_is_nothing_to_choose_where_memory_is_shared() -> None:
    assert MessageTimes(cpus(1, 4)).other_all_reduces((0, 1, 2, 3)) == []
    assert "ring-tree" not in MessageTimes(plan_cluster(1, 4)).other_all_reduces((0, 1, 2, 3))
    assert "direct" not in MessageTimes(cpus(16)).other_all_reduces(tuple(range(16)))
