"""What a rank leaves to the one that takes its place."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from evener.inheritance import Generators


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_another_process_draws_what_was_to_be_drawn(tmp_path: Path) -> None:
    kept = Generators(tmp_path / "rank")
    expected = {}
    for step in range(5):
        kept.keep(step)
        expected[step] = draw()
    assert kept.kept == 4
    found = Generators(tmp_path / "rank")
    for step in (4, 3):
        assert found.draw(step)
        assert draw() == expected[step]
    before = torch.get_rng_state()
    assert not found.draw(2), "the last two are kept"
    assert not found.draw(5)
    assert torch.equal(before, torch.get_rng_state())
    assert not Generators(tmp_path / "other").draw(0)


def test_a_torn_entry_is_none(tmp_path: Path) -> None:
    """Of a process that was killed while it wrote: the number comes last."""
    kept = Generators(tmp_path / "rank")
    kept.keep(0)
    kept._map[:8] = (-1).to_bytes(8, "little", signed=True)
    assert not Generators(tmp_path / "rank").draw(0)
