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
