"""The peaks that follow from what a step with all blocks computed again has shown, and the number that fits."""

from __future__ import annotations

from typing import Any

import pytest

from evener.components.activation_checkpoint.profiling import Counted, fewest


class Bytes:
    """In the place of a tracker: what a step holds, told by hand."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def reset_peak(self) -> None:
        self.peak = self.held


def counted(*sizes: int, calls: int = 1) -> Counted:
    """A step of blocks that hold these bytes, beside 10 bytes in any case and 1 more for the loss."""
    held: Any = Bytes()
    found = Counted(held)
    held.hold(10)
    noted = [(found.called(f"b{place}"), size) for _ in range(calls) for place, size in enumerate(sizes)]
    held.hold(1)
    held.hold(-1)
    for call, size in reversed(noted):
        with found.again(call):
            held.hold(size)
        held.hold(-size)
    found.passed()
    return found


def test_the_peak_is_what_was_held_and_what_waiting_blocks_keep() -> None:
    assert counted(8, 8).names == {"b0", "b1"}
    assert counted(8, 8).peaks(["b0", "b1"]) == [27, 19, 18]
    assert counted(2, 6, 4).peaks(["b0", "b1", "b2"]) == [23, 21, 16, 16]


def test_a_block_that_is_called_twice_keeps_twice_as_much() -> None:
    assert counted(8, calls=2).peaks(["b0"]) == [27, 18]


def test_a_block_that_this_rank_did_not_call_changes_nothing() -> None:
    assert counted(8).peaks(["a", "b0"]) == [19, 19, 18]
    assert counted().peaks(["a"]) == [11, 11]


@pytest.mark.parametrize(("room", "count"), [(40, 0), (27, 0), (26, 1), (19, 1), (18, 2), (17, 2), (0, 2)])
def test_as_few_blocks_as_fit_are_computed_again(room: int, count: int) -> None:
    assert fewest([27, 19, 18], room) == count
