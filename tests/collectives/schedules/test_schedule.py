from __future__ import annotations

import numpy as np
import pytest

from evener.collectives.schedules.ring import ring
from evener.collectives.schedules.schedule import RankRound, Round, Schedule, Stretch, Topology, Transfer


def test_topology_numbers_ranks_from_host_to_host() -> None:
    topology = Topology.of_hosts([4, 2, 3])
    assert topology.hosts == ((0, 1, 2, 3), (4, 5), (6, 7, 8))
    assert topology.world_size == 9
    assert [topology.host_of(rank) for rank in range(9)] == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert topology.place.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]


def test_topology_takes_ranks_in_any_order() -> None:
    topology = Topology(((2, 0), (1,)))
    assert topology.order.tolist() == [2, 0, 1]
    assert topology.host_index.tolist() == [0, 1, 0]
    assert topology.place.tolist() == [1, 0, 0]


def test_flat_topology_is_one_host() -> None:
    assert Topology.flat(3).hosts == ((0, 1, 2),)


@pytest.mark.parametrize("hosts", [(), ((),), ((0, 1), ()), ((0, 0),), ((0, 2),), ((1, 2),), ((0, 1), (1,))])
def test_topology_refuses_missing_and_double_ranks(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="once each"):
        Topology(hosts)


def test_round_broadcasts_and_lists_row_by_row() -> None:
    ranks = np.arange(2)
    round_ = Round.from_columns(ranks[:, None], ranks[None, :], 0, 3, ranks[:, None] > 0)
    assert len(round_) == 4
    assert list(round_) == [
        Transfer(0, 0, 0, 3, False),
        Transfer(0, 1, 0, 3, False),
        Transfer(1, 0, 0, 3, True),
        Transfer(1, 1, 0, 3, True),
    ]


def test_round_together_keeps_the_order() -> None:
    first, second = Round.from_columns([0], [1], 0, 1, True), Round.from_columns([2, 1], [1, 0], 1, 2, False)
    assert list(Round.together([first, second])) == [*first, *second]


def test_for_rank_lists_sends_and_receives_in_the_order_of_the_round() -> None:
    moves = Round.from_columns(
        [2, 1, 0, 1], [1, 1, 1, 2], [0, 0, 0, 1], [1, 1, 1, 2], [False, True, True, True]
    )
    schedule = Schedule.from_stretches(Topology.flat(3), np.array([0.0, 0.5, 1.0]), [Stretch.once(moves)])
    received = (Transfer(2, 1, 0, 1, False), Transfer(1, 1, 0, 1, True), Transfer(0, 1, 0, 1, True))
    assert schedule.for_rank(1) == [RankRound((Transfer(1, 2, 1, 2, True),), received)]
    assert schedule.for_rank(0) == [RankRound((Transfer(0, 1, 0, 1, True),), ())]


def test_for_rank_has_an_entry_for_idle_rounds() -> None:
    schedule = Schedule.from_stretches(
        Topology.flat(3), np.arange(2.0), [Stretch.once(Round.from_columns([0], [1], 0, 1, True))]
    )
    assert schedule.for_rank(2) == [RankRound((), ())]


def test_rounds_expand_stretches() -> None:
    schedule = ring(Topology.flat(5))
    assert [stretch.times for stretch in schedule.stretches] == [4, 4]
    assert len(list(schedule.rounds())) == 8


@pytest.mark.parametrize(("numel", "offsets"), [(10, [0, 2, 5, 7, 10]), (4, [0, 1, 2, 3, 4]), (0, [0] * 5)])
def test_offsets_divide_all_elements(numel: int, offsets: list[int]) -> None:
    assert ring(Topology.flat(4)).offsets(numel) == offsets


def test_offsets_leave_chunks_empty_where_elements_are_few() -> None:
    assert ring(Topology.flat(4)).offsets(1) == [0, 0, 0, 0, 1]
