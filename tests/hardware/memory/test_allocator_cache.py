"""When memory is lost in pieces, and when giving back what is cached helps."""

from __future__ import annotations

import pytest

from evener.hardware.memory.allocator_cache import (
    lost_in_pieces,
    releasable,
    remedy,
    wanted_by_others,
    worth_emptying,
)
from evener.hardware.memory.step_usage import Lap

MIB, GIB = 1 << 20, 1 << 30


def lap(held: int, reserved: int, split: int = 0, retries: int = 0, failures: int = 0) -> Lap:
    return Lap(held, held, reserved, split, retries, failures)


@pytest.mark.parametrize(
    ("found", "asked", "is_worth"),
    [
        (lap(1 * GIB, 10 * GIB), 2 * GIB, True),  # what had filled the memory has gone
        (lap(9 * GIB, 10 * GIB), 2 * GIB, False),  # less than was asked for
        (lap(1 * GIB, 10 * GIB, split=8 * GIB), 2 * GIB, False),  # PyTorch cannot give that back
        (lap(1 * GIB, 10 * GIB), 0, True),  # nobody knows how much
        (lap(1 * GIB, 1 * GIB + 32 * MIB), 0, False),  # not worth waiting for
        (lap(0, 0), 0, False),  # a CPU's
    ],
)
def test_the_cache_is_emptied_where_that_helps(found: Lap, asked: int, is_worth: bool) -> None:
    assert worth_emptying(found, asked) is is_worth


def test_what_lies_between_tensors_cannot_be_given_back() -> None:
    assert releasable(lap(6, 10, split=3)) == 1
    assert releasable(lap(6, 5)) == 0


@pytest.mark.parametrize(
    ("free", "others", "is_wanted"),
    [(1 * GIB, 3 * GIB, True), (8 * GIB, 3 * GIB, False), (1 * GIB, 0, False)],
)
def test_another_process_wants_memory_where_little_is_free(free: int, others: int, is_wanted: bool) -> None:
    assert wanted_by_others(lap(1 * GIB, 10 * GIB), free, 24 * GIB, others) is is_wanted
    assert not wanted_by_others(lap(10 * GIB, 10 * GIB), free, 24 * GIB, others)


QUIET = lap(5 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        (lap(5 * GIB, 10 * GIB, 2 * GIB, failures=1), 2 * GIB),
        (lap(5 * GIB, 10 * GIB, 2 * GIB, retries=1), 2 * GIB),
        (lap(5 * GIB, 10 * GIB, 2 * GIB), 0),  # and nobody minds
        (lap(5 * GIB, 10 * GIB, 5 * GIB), 5 * GIB),  # half of it is too much
        (lap(5 * GIB, 10 * GIB, GIB // 2, failures=1), 0),  # it failed for another reason
        (lap(MIB, 80 * MIB, 60 * MIB), 0),  # of little
    ],
)
def test_what_is_lost_in_pieces(now: Lap, lost: int) -> None:
    assert lost_in_pieces(QUIET, now) == lost


def test_a_failure_is_told_in_its_own_step() -> None:
    after = lap(5 * GIB, 10 * GIB, 2 * GIB, failures=1)
    assert lost_in_pieces(after, after) == 0


@pytest.mark.parametrize(
    ("kind", "variables", "words"),
    [
        ("cuda", {}, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the run"),
        ("xpu", {}, "set PYTORCH_ALLOC_CONF=expandable_segments:True before the run"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"}, "smaller micro_batch"),
        ("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "smaller micro_batch"),
        ("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "set PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_the_remedy_is_not_one_that_is_there(kind: str, variables: dict[str, str], words: str) -> None:
    assert words in remedy(kind, variables)
