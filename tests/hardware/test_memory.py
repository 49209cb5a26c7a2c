from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evener.hardware import memory

CPU = torch.device("cpu")


def test_the_ranks_of_a_host_share_its_memory() -> None:
    assert memory.memory_nbytes(CPU, 4) == pytest.approx(memory.memory_nbytes(CPU, 1) / 4, abs=4)
    assert memory.memory_nbytes(CPU, 1) > 2**28


@pytest.mark.parametrize(("text", "limited"), [("1048576\n", True), ("max\n", False), (None, False)])
def test_a_container_may_have_less(
    text: str | None, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "memory.max"
    if text is not None:
        place.write_text(text)
    monkeypatch.setattr(memory, "LIMIT", place)
    assert (memory.memory_nbytes(CPU, 2) == 2**19) == limited
