"""Double binary tree: a logarithmic number of rounds at the full bandwidth of every rank.

In one binary tree half of the ranks are leaves, which receive little and forward nothing. So half of the buffer
goes up and down one tree, and the other half a second tree, in which the inner ranks of the first are leaves: no
rank is inner in both. Each half is cut into ``segments`` that follow each other through a pipeline: up from the
deepest level to the root, then down again. The first tree numbers its ranks from left to right; the second is the
first, moved on by one rank::

              3                      4
          1       5              2       0
        0   2   4              1   3   5

    round   rank 0   rank 1    rank 2    rank 3    rank 4    rank 5
        0   0>1+     1>2+      0>1+      1>2+      0>5+      1>0+
        1   1>4+     0>3+      1>4+                          0>3+
        2                                0>1 0>5   1>0 1>2
        3   1>5      0>0 0>2   1>1 1>3                       0>4

(``0>1+``: chunk 0 goes to rank 1 and is added there; chunk 0 is the half of the first tree.)

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35(12), 2009. There a rank sends one message per round; here it sends to both children at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from evener.collectives.schedules.schedule import Ints, Round, Schedule, Stretch, Topology


def double_tree(topology: Topology, segments: int = 1) -> Schedule:
    """Returns the schedule of two trees over all ranks, host by host: ``2 * depth + segments - 1`` rounds."""
    stretches = trees(topology.order[:, None], segments)
    chunks = 2 * segments if topology.world_size > 1 else 1
    return Schedule.from_stretches(topology, np.arange(chunks + 1) / chunks, stretches)


def trees(members: Ints, segments: int) -> Iterator[Stretch]:
    """Yields parallel all-reduces, each over two trees.

    Args:
        members: Shape [size, pieces]. Column ``i`` holds the ranks that all-reduce piece ``i`` of the buffer,
            whose chunks are ``2 * segments * i`` and on, those of its first tree before those of its second.
        segments: Number of parts into which each half of a piece is cut.

    Raises:
        ValueError: If ``segments`` is below 1.
    """
    if segments < 1:
        raise ValueError(f"a pipeline needs at least 1 segment, got {segments}")
    size, pieces = members.shape
    above = parents(size)
    level = _levels(above)
    first_chunk = np.arange(pieces)[None, :] * 2 * segments
    up, down = [], []
    for depth in range(level.max(), 0, -1):
        children = np.flatnonzero(level == depth)
        lower, upper = _both_trees(members, children), _both_trees(members, above[children])
        chunk = np.concatenate([first_chunk + tree * segments + 0 * children[:, None] for tree in (0, 1)])
        up.append(Round.from_columns(lower, upper, chunk, chunk + 1, reduce=True))
        down.append(Round.from_columns(upper, lower, chunk, chunk + 1, reduce=False))
    return pipeline(up + down[::-1], segments)


def parents(size: int) -> Ints:
    """Returns the parent of each position in a binary tree numbered from left to right; -1 for the root.

    Counted from 1, a position with h trailing zero bits is h levels above the lowest level, which has the odd
    positions. If a parent lies beyond the end, its own parent takes its place. Even positions (from 0) are always
    leaves.
    """
    label = np.arange(1, size + 1)
    root = 1 << (size.bit_length() - 1)
    parent = _above(label)
    while (beyond := (parent > size) & (label != root)).any():
        parent[beyond] = _above(parent[beyond])
    parent[root - 1] = 0
    return parent - 1


def pipeline(stages: Sequence[Round], segments: int) -> Iterator[Stretch]:
    """Yields a pipeline: in round ``r``, stage ``j`` moves segment ``r - j``.

    ``stages`` as given move segment 0; the chunk numbers of segment ``s`` are larger by ``s``. The rounds in which
    all stages are busy are alike and form one stretch.
    """
    round_ = 0
    while stages and round_ < len(stages) + segments - 1:
        all_busy = round_ == len(stages) - 1
        times = max(1, segments - round_) if all_busy else 1
        yield Stretch(times, partial(_busy_stages, stages, segments, round_))
        round_ += times


def _busy_stages(stages: Sequence[Round], segments: int, first: int, index: int) -> Round:
    round_ = first + index
    moves = [(stage, round_ - j) for j, stage in enumerate(stages) if 0 <= round_ - j < segments]
    return Round.together(
        [Round(s.src, s.dst, s.start + segment, s.stop + segment, s.reduce) for s, segment in moves]
    )


def _both_trees(members: Ints, positions: Ints) -> Ints:
    """Returns the ranks at these positions of the first and of the second tree, shape [2 * positions, pieces]."""
    standing: Ints = members[np.concatenate([positions, (positions + 1) % len(members)])]
    return standing


def _above(label: Ints) -> Ints:
    lowest_bit: Ints = label & -label
    above: Ints = (label - lowest_bit) | (lowest_bit << 1)
    return above


def _levels(above: Ints) -> Ints:
    """Returns the depth of each position, 0 at the root."""
    level = np.zeros(len(above), dtype=np.int64)
    ancestor = above
    while (inside := ancestor >= 0).any():
        level += inside
        ancestor = np.where(inside, above[ancestor], -1)
    return level
