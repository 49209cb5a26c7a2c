from __future__ import annotations

import pytest

from evener.collectives.schedules.schedule import Round, Topology
from evener.collectives.schedules.tree import double_tree, parents, pipeline


@pytest.mark.parametrize("size", range(1, 200))
def test_positions_form_one_binary_tree_of_the_least_depth(size: int) -> None:
    above = parents(size).tolist()
    assert above.count(-1) == 1
    assert max(above.count(position) for position in range(size)) <= 2
    assert max(_depth(position, above) for position in range(size)) == size.bit_length() - 1


def _depth(position: int, above: list[int]) -> int:
    depth = 0
    while above[position] >= 0:
        position, depth = above[position], depth + 1
    return depth


def test_tree_is_numbered_from_left_to_right() -> None:
    assert parents(6).tolist() == [1, 3, 1, -1, 5, 3]


@pytest.mark.parametrize("world_size", range(2, 70))
def test_no_rank_is_inner_in_both_trees(world_size: int) -> None:
    transfers = [t for round_ in double_tree(Topology.flat(world_size)).rounds() for t in round_ if t.reduce]
    inner = [{t.dst for t in transfers if t.start == tree} for tree in (0, 1)]
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5, 20])
def test_every_stage_moves_every_segment_in_turn(segments: int) -> None:
    stages = [Round.from_columns([stage], [stage + 1], 0, 1, False) for stage in range(4)]
    rounds = [s.round_at(step) for s in pipeline(stages, segments) for step in range(s.times)]
    moves = [[(t.src, t.start) for t in round_] for round_ in rounds]
    expected = [[(j, r - j) for j in range(4) if 0 <= r - j < segments] for r in range(segments + 3)]
    assert moves == expected


def test_rounds_in_which_all_stages_are_busy_are_one_stretch() -> None:
    stages = [Round.from_columns([stage], [stage + 1], 0, 1, False) for stage in range(4)]
    assert [stretch.times for stretch in pipeline(stages, 20)] == [1, 1, 1, 17, 1, 1, 1]


def test_double_tree_takes_twice_its_depth_in_rounds() -> None:
    assert len(list(double_tree(Topology.flat(64), segments=1).rounds())) == 12
    assert len(list(double_tree(Topology.flat(64), segments=10).rounds())) == 12 + 9


def test_a_pipeline_without_segments_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 segment, got 0"):
        double_tree(Topology.flat(4), segments=0)
