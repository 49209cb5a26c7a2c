"""Who owns which rows: parts that are asked for, as near as rows allow."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evener.strategies.sharded.ownership import divide_rows

PARTS = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.7, 40.0]), min_size=1, max_size=5).filter(any)
TABLES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=12)


def test_what_the_drawing_shows() -> None:
    found = divide_rows([(5, 100), (4, 30), (20, 1)], [2 / 3, 1 / 3])
    assert found == [(range(3), range(3, 5)), (range(4), range(4, 4)), (range(7), range(7, 20))]


def test_the_order_of_tables_is_kept() -> None:
    tables = [(20, 1), (5, 100), (4, 30)]
    assert divide_rows(tables, [2 / 3, 1 / 3])[1] == (range(3), range(3, 5))


@given(TABLES, PARTS)
def test_every_rank_has_its_part_to_a_row(tables: list[tuple[int, int]], parts: list[float]) -> None:
    asked = [part / sum(parts) for part in parts]
    found = divide_rows(tables, asked)
    for (rows, _), pieces in zip(tables, found, strict=True):
        assert pieces[0].start == 0
        assert pieces[-1].stop == rows
        assert all(before.stop == after.start for before, after in pairwise(pieces))
    total = sum(rows * size for rows, size in tables)
    for rank, part in enumerate(asked):
        held = sum(len(pieces[rank]) * size for (_, size), pieces in zip(tables, found, strict=True))
        assert abs(held - part * total) <= max(size for _, size in tables) * 1.001
        assert part or not held, "who is to own nothing owns nothing"
