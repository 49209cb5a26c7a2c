"""Schedules that are almost an all-reduce, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.schedule import Round, Schedule, Stretch, Topology, Transfer
from evener.collectives.schedules.validate import validate


def schedule_of(*rounds: list[Transfer], ranks: int = 3, chunks: int = 1) -> Schedule:
    stretches = [Stretch.once(Round.from_columns(*zip(*round_, strict=True))) for round_ in rounds]
    return Schedule.from_stretches(Topology.flat(ranks), np.arange(chunks + 1) / chunks, stretches)


def add(src: int, dst: int, start: int = 0) -> Transfer:
    return Transfer(src, dst, start, start + 1, True)


def copy(src: int, dst: int, start: int = 0) -> Transfer:
    return Transfer(src, dst, start, start + 1, False)


def test_reduce_and_broadcast_is_an_all_reduce() -> None:
    validate(schedule_of([add(1, 0), add(2, 0)], [copy(0, 1), copy(0, 2)]))


def test_a_missing_contribution_is_found() -> None:
    with pytest.raises(ValueError, match="rank 0 ends without chunk 0 of rank 2's contribution"):
        validate(schedule_of([add(1, 0)], [copy(0, 1), copy(0, 2)]))


def test_a_contribution_added_twice_is_found() -> None:
    with pytest.raises(ValueError, match=r"round 1: .* adds the contribution of rank 1 to chunk 0 twice"):
        validate(schedule_of([add(1, 0)], [add(1, 0)]))


def test_the_same_sum_in_another_order_is_found() -> None:
    one_by_one = schedule_of(
        [add(1, 0), add(2, 0), copy(0, 1), add(2, 1), add(1, 1), copy(0, 2), add(1, 2), add(2, 2)]
    )
    with pytest.raises(ValueError, match="ranks 0 and 1 add chunk 0 in different orders"):
        validate(one_by_one)


def test_a_round_reads_what_was_there_before_it() -> None:
    with pytest.raises(ValueError, match="rank 1 ends without chunk 0 of rank 1's contribution"):
        validate(schedule_of([add(1, 0), copy(0, 1)], ranks=2))


def test_a_copy_over_what_arrived_in_the_same_round_is_found() -> None:
    with pytest.raises(ValueError, match=r"round 0: .* overwrites chunk 0"):
        validate(schedule_of([add(1, 0), copy(2, 0)]))


def test_a_copy_over_another_chunk_is_none_of_that() -> None:
    validate(schedule_of([add(1, 0), add(0, 1, 1)], [copy(0, 1), copy(1, 0, 1)], ranks=2, chunks=2))


@pytest.mark.parametrize(
    "transfer", [add(3, 0), add(0, -1), add(0, 1, 1), add(0, 1, -1), Transfer(0, 1, 0, 0, True)]
)
def test_ranks_and_chunks_that_do_not_exist_are_found(transfer: Transfer) -> None:
    with pytest.raises(ValueError, match="there are 3 ranks and 1 chunks"):
        validate(schedule_of([transfer]))


@pytest.mark.parametrize("bounds", [[0.0, 0.5], [0.5, 1.0], [0.0, 0.6, 0.4, 1.0]])
def test_chunks_that_do_not_divide_the_buffer_are_found(bounds: list[float]) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        validate(Schedule.from_stretches(Topology.flat(1), np.array(bounds), ()))


@pytest.mark.parametrize("second", [add(1, 0), Transfer(0, 1, 1, 3, True), copy(0, 1)])
def test_rounds_of_a_stretch_that_load_other_links_are_found(second: Transfer) -> None:
    rounds = [Round.from_columns(*add(0, 1)), Round.from_columns(*second)]
    unlike = Schedule.from_stretches(
        Topology.flat(2), np.arange(4) / 3, [Stretch(2, lambda index: rounds[index])]
    )
    with pytest.raises(ValueError, match="round 1 of"):
        validate(unlike)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_that_loses_its_last_round_is_found(name: str) -> None:
    whole = ALGORITHMS[name](Topology.of_hosts([3, 2]))
    rounds = list(whole.rounds())[:-1]
    cut = Schedule.from_stretches(whole.topology, whole.bounds, map(Stretch.once, rounds))
    with pytest.raises(ValueError, match="ends without"):
        validate(cut)
