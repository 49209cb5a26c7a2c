"""Rooms are used again, and those that nobody wants any more are let go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evener.components.offload.pool import LOOSEST, PATIENCE, Pool


class Made:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, nbytes: int) -> int:
        self.count += 1
        return self.count


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60))
def test_a_room_is_large_enough_not_much_too_large_and_nobody_elses(actions: list[tuple[int, bool]]) -> None:
    pool = Pool[int](Made())
    held: dict[int, int] = {}
    for nbytes, gives_back in actions:
        if gives_back and held:
            room = next(iter(held))
            pool.give_back(room, held.pop(room))
            continue
        room, size = pool.take_buffer(nbytes)
        assert nbytes <= size <= LOOSEST * nbytes
        assert room not in held
        held[room] = size
        assert sum(held.values()) <= pool.nbytes <= pool.peak


def step(pool: Pool[int], sizes: list[int]) -> None:
    rooms = [pool.take_buffer(size) for size in sizes]
    for room in rooms:
        pool.give_back(*room)


def test_a_step_like_the_one_before_makes_no_room() -> None:
    made = Made()
    pool = Pool[int](made)
    for _ in range(5):
        step(pool, [10, 30, 20, 10])
    assert made.count == 4
    assert pool.nbytes == pool.peak == 70


def test_sizes_that_do_not_come_again_do_not_add_up() -> None:
    pool = Pool[int](Made())
    for number in range(200):
        step(pool, [2**number, 2**number * 3])
    assert pool.nbytes <= 4 * sum(2**number for number in range(200 - PATIENCE, 201))
    assert len(pool._free) <= 3 * PATIENCE
