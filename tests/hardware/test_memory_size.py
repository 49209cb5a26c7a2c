from __future__ import annotations

import pytest
import torch

from evener.hardware import memory_size as memory

CPU = torch.device("cpu")


def test_the_ranks_of_a_host_share_its_memory() -> None:
    assert memory.memory_nbytes(CPU, 4) == pytest.approx(memory.memory_nbytes(CPU, 1) / 4, abs=4)
    assert memory.memory_nbytes(CPU, 1) > 2**28


@pytest.mark.parametrize("limit", [2**20, None])
def test_a_container_may_have_less(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: limit)
    assert (memory.memory_nbytes(CPU, 2) == 2**19) == (limit is not None)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 2000), (10_000, 2000), (3000, 900), (1000, 0)],
)
def test_what_a_rank_may_still_take(limit: int | None, expected: float) -> None:
    """Of a host that has 4,000 bytes left, one of two ranks that has taken 600."""
    assert memory.free_of_host(4000, 600, limit, 2) == expected


def test_a_host_has_some_left() -> None:
    assert 0 < memory.free_nbytes(CPU, 1, None) <= memory.memory_nbytes(CPU, 1)
