"""Programs are played without any messages, by hand-over in memory, and held against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.collectives.executor.program import ElementRange, Program, ProgramRound, compile_program
from evener.collectives.schedules.algorithms import ALGORITHMS, usable_on
from evener.collectives.schedules.schedule import Topology


def play(programs: list[Program], buffers: list[torch.Tensor]) -> None:
    """All ranks take a round at a time; sends read what was there before it."""
    for rounds in zip(*(program.rounds for program in programs), strict=True):
        mail = {}
        for rank, program_round in enumerate(rounds):
            for peer, what in program_round.sends:
                mail.setdefault((rank, peer), []).append(buffers[rank][what.start : what.stop].clone())
        for rank, program_round in enumerate(rounds):
            take(rank, program_round, buffers[rank], mail)
        assert not any(mail.values()), "a message that nobody receives"


def take(
    rank: int,
    program_round: ProgramRound,
    buffer: torch.Tensor,
    mail: dict[tuple[int, int], list[torch.Tensor]],
) -> None:
    before = buffer.clone()
    for arrival in program_round.arrivals:
        where = slice(arrival.where.start, arrival.where.stop)
        value = before[where] if arrival.peer == rank else mail[arrival.peer, rank].pop(0)
        buffer[where] = buffer[where] + value if arrival.reduce else value


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    name=st.sampled_from(sorted(ALGORITHMS)),
    numel=st.integers(1, 40),
    segments=st.integers(1, 3),
)
def test_programs_sum(sizes: list[int], name: str, numel: int, segments: int) -> None:
    topology = Topology.of_hosts(sizes)
    if name not in usable_on(topology):
        return
    schedule = ALGORITHMS[name](topology, segments)
    programs = [compile_program(schedule, rank, numel) for rank in range(topology.world_size)]
    terms = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (topology.world_size, numel)))
    buffers = list(terms.clone())
    play(programs, buffers)
    for buffer in buffers:
        assert torch.equal(buffer, terms.sum(0))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_is_received_in_place_disturbs_nothing(name: str) -> None:
    schedule = ALGORITHMS[name](Topology.of_hosts([3, 2]), 2)
    for rank in range(5):
        for program_round in compile_program(schedule, rank, 30).rounds:
            in_place = [arrival for arrival in program_round.arrivals if arrival.scratch is None]
            for arrival in in_place:
                others = [other.where for other in program_round.arrivals if other is not arrival]
                assert not arrival.reduce
                assert not any(arrival.where.overlaps(what) for _, what in program_round.sends)
                assert not any(arrival.where.overlaps(other) for other in others)


def test_scratch_ranges_do_not_overlap() -> None:
    program = compile_program(ALGORITHMS["direct"](Topology.flat(4), 1), 0, 10)
    used = [
        arrival.scratch
        for program_round in program.rounds
        for arrival in program_round.arrivals
        if arrival.scratch
    ]
    assert len(used) > 1
    assert not any(a.overlaps(b) for i, a in enumerate(used) for b in used[i + 1 :])
    assert program.scratch == max(range_.stop for range_ in used)


def test_ranges_that_touch_do_not_overlap() -> None:
    assert not ElementRange(0, 3).overlaps(ElementRange(3, 5))
    assert ElementRange(0, 4).overlaps(ElementRange(3, 5))
