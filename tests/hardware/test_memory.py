from __future__ import annotations

import pytest
import torch

from evener.hardware import memory

CPU = torch.device("cpu")


def test_the_ranks_of_a_host_share_its_memory() -> None:
    assert memory.memory_nbytes(CPU, 4) == pytest.approx(memory.memory_nbytes(CPU, 1) / 4, abs=4)
    assert memory.memory_nbytes(CPU, 1) > 2**28


@pytest.mark.parametrize("limit", [2**20, None])
def test_a_container_may_have_less(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: limit)
    assert (memory.memory_nbytes(CPU, 2) == 2**19) == (limit is not None)


MEMINFO = "MemTotal:  9000 kB\nMemAvailable:    4000 kB\nBuffers: 1 kB"


@pytest.mark.parametrize(
    ("meminfo", "pages", "limit", "expected"),
    [
        (MEMINFO, 10, None, 2000 * 1024),
        (MEMINFO, 10, 2**20, 2**19 - 10 * 4096),
        (MEMINFO, 1000, 2**20, 0),
        ("", 10, None, float("inf")),
        ("", 10, 2**20, 2**19 - 10 * 4096),
    ],
)
def test_what_a_rank_may_still_take(
    meminfo: str, pages: int, limit: int | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PAGE", 4096)
    assert memory.free_of_host(meminfo, f"5000 {pages} 3", limit, 2) == expected


def test_a_host_has_some_left() -> None:
    assert 0 < memory.free_nbytes(CPU, 1) <= memory.memory_nbytes(CPU, 1)
