"""What holds for every algorithm: a new entry of ``ALGORITHMS`` is tested without new tests."""

from __future__ import annotations

import importlib
from collections import defaultdict, deque

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.collectives.schedules.algorithms import ALGORITHMS, usable_on
from evener.collectives.schedules.direct import MOST_RANKS, direct
from evener.collectives.schedules.draw import draw
from evener.collectives.schedules.schedule import Floats, RankRound, Schedule, Topology
from evener.collectives.schedules.validate import validate

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@st.composite
def topologies(draw_value: st.DrawFn, most_ranks: int = 64) -> Topology:
    """Hosts of any sizes, whose ranks may be numbered in any order."""
    world_size = draw_value(st.integers(1, most_ranks))
    ends = draw_value(st.sets(st.integers(1, world_size), max_size=12)) | {world_size}
    ranks = draw_value(st.one_of(st.just(range(world_size)), st.permutations(range(world_size))))
    starts = [0, *sorted(ends)[:-1]]
    return Topology(tuple(tuple(ranks[a:b]) for a, b in zip(starts, sorted(ends), strict=True)))


@every_algorithm
@given(topology=topologies(), segments=st.integers(1, 9))
@settings(max_examples=40)
def test_is_an_all_reduce_on_any_topology(name: str, topology: Topology, segments: int) -> None:
    validate(ALGORITHMS[name](topology, segments))


@every_algorithm
def test_is_an_all_reduce_on_any_number_of_ranks(name: str) -> None:
    for world_size in [*range(1, 34), 48, 63, 64]:
        validate(ALGORITHMS[name](Topology.flat(world_size)))


@every_algorithm
def test_one_rank_does_nothing(name: str) -> None:
    assert list(ALGORITHMS[name](Topology.flat(1), 4).rounds()) == []


@every_algorithm
@pytest.mark.parametrize("sizes", [[2], [5], [3, 1, 2], [2, 2, 2, 2]])
@pytest.mark.parametrize("numel", [0, 1, 7, 100])
def test_messages_add_up_to_the_same_bits_on_all_ranks(name: str, sizes: list[int], numel: int) -> None:
    schedule = ALGORITHMS[name](Topology.of_hosts(sizes), 3)
    values = np.random.default_rng(1).normal(size=(sum(sizes), numel)).astype(np.float32)
    results = execute(schedule, values)
    assert np.allclose(results[0], values.sum(axis=0), atol=1e-5)
    assert all(result.tobytes() == results[0].tobytes() for result in results)


Buffers = npt.NDArray[np.float32]


def execute(schedule: Schedule, values: Buffers) -> Buffers:
    """Every rank acts only on its own rounds; messages between two ranks keep their order."""
    buffers, offsets = values.copy(), schedule.offsets(values.shape[1])
    ranks = [schedule.for_rank(rank) for rank in range(len(values))]
    for steps in zip(*ranks, strict=True):
        wires: dict[tuple[int, int], deque[Buffers]] = defaultdict(deque)
        for rank, step in enumerate(steps):
            local = [t for t in step.receives if t.src == rank]
            for t in (*step.sends, *local):
                wires[rank, t.dst].append(buffers[rank, offsets[t.start] : offsets[t.stop]].copy())
        for rank, step in enumerate(steps):
            _receive(buffers[rank], offsets, step, wires)
        assert not any(wires.values())
    return buffers


def _receive(
    buffer: Buffers, offsets: list[int], step: RankRound, wires: dict[tuple[int, int], deque[Buffers]]
) -> None:
    for t in step.receives:
        part = buffer[offsets[t.start] : offsets[t.stop]]
        arrived = wires[t.src, t.dst].popleft()
        part[:] = part + arrived if t.reduce else arrived


@pytest.mark.parametrize(
    ("module", "name", "topology"),
    [
        ("ring", "ring", Topology.flat(3)),
        ("direct", "direct", Topology.flat(3)),
        ("halving", "halving", Topology.flat(5)),
        ("tree", "tree", Topology.flat(6)),
        ("hierarchical", "ring-tree", Topology.of_hosts([2, 1])),
    ],
)
def test_the_documentation_draws_what_happens(module: str, name: str, topology: Topology) -> None:
    documentation = importlib.import_module(f"evener.collectives.schedules.{module}").__doc__
    lines = [line.strip() for line in documentation.splitlines()]
    drawing = [line.strip() for line in draw(ALGORITHMS[name](topology)).splitlines()]
    first = lines.index(drawing[0])
    assert lines[first : first + len(drawing)] == drawing


def bytes_through_ports(schedule: Schedule) -> tuple[Floats, Floats]:
    """What share of the buffer each rank sends and receives in all, in buffers."""
    sent = np.zeros(schedule.topology.world_size)
    received = np.zeros(schedule.topology.world_size)
    for round_ in schedule.rounds():
        share = schedule.bounds[round_.stop] - schedule.bounds[round_.start]
        np.add.at(sent, round_.src, share)
        np.add.at(received, round_.dst, share)
    return sent, received


@pytest.mark.parametrize("world_size", [2, 3, 7, 16])
def test_ring_moves_the_least_that_an_all_reduce_can(world_size: int) -> None:
    sent, received = bytes_through_ports(ALGORITHMS["ring"](Topology.flat(world_size)))
    assert sent == pytest.approx(2 * (world_size - 1) / world_size)
    assert received == pytest.approx(2 * (world_size - 1) / world_size)


@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_halving_moves_as_little_as_a_ring_on_powers_of_two(world_size: int) -> None:
    sent, _ = bytes_through_ports(ALGORITHMS["halving"](Topology.flat(world_size)))
    assert sent == pytest.approx(2 * (world_size - 1) / world_size)


def test_halving_exchanges_large_halves_inside_a_host() -> None:
    topology = Topology.of_hosts([2, 2, 2, 2])
    first = next(iter(ALGORITHMS["halving"](topology).rounds()))
    assert all(topology.host_of(t.src) == topology.host_of(t.dst) for t in first)


@pytest.mark.parametrize("world_size", [2, 3, 6, 13, 32])
def test_no_rank_of_the_double_tree_moves_more_than_two_buffers(world_size: int) -> None:
    sent, received = bytes_through_ports(ALGORITHMS["tree"](Topology.flat(world_size), 4))
    assert max(*sent, *received) <= 2 + 1e-9


def test_ring_enters_and_leaves_each_host_once() -> None:
    topology = Topology(((0, 3, 5), (1, 4), (2,)))
    crossings = [
        t for t in next(iter(ALGORITHMS["ring"](topology).rounds())) if _crosses(topology, t.src, t.dst)
    ]
    assert len(crossings) == 3


@pytest.mark.parametrize("sizes", [[4, 2, 3], [1, 5], [3, 3, 3]])
def test_ring_tree_takes_each_buffer_off_a_host_at_most_twice(sizes: list[int]) -> None:
    topology = Topology.of_hosts(sizes)
    schedule = ALGORITHMS["ring-tree"](topology, 2)
    left = np.zeros(len(sizes))
    for round_ in schedule.rounds():
        for t in round_:
            if _crosses(topology, t.src, t.dst):
                left[topology.host_of(t.src)] += schedule.bounds[t.stop] - schedule.bounds[t.start]
    assert left.max() <= 2 + 1e-9


def _crosses(topology: Topology, src: int, dst: int) -> bool:
    return topology.host_of(src) != topology.host_of(dst)


def test_direct_refuses_more_ranks_than_it_can_serve() -> None:
    with pytest.raises(ValueError, match="beyond 1024 ranks; there are 1025"):
        direct(Topology.flat(MOST_RANKS + 1))


def test_usable_algorithms_depend_on_the_number_of_ranks() -> None:
    assert usable_on(Topology.flat(4)) == tuple(ALGORITHMS)
    assert set(ALGORITHMS) - set(usable_on(Topology.flat(4096))) == {"direct"}
