"""What a rank leaves to the one that takes its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from evener.training.state.rng_file import Generators


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def following() -> tuple[float, ...]:
    return (float(np.random.randn()), float(np.random.randn()), random.gauss(0, 1), *draw())


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


def test_whatever_was_drawn_from_is_kept_anew(tmp_path: Path) -> None:
    """Also where NumPy hands out the second of two normal numbers, which moves its generator not at all."""
    kinds: dict[str, Callable[[], object]] = {
        "numpy": np.random.rand,
        "numpy's normal": np.random.randn,
        "its second": np.random.randn,
        "python": random.random,
        "python's normal": lambda: random.gauss(0, 1),
        "torch": lambda: torch.rand(1),
    }
    kept = Generators(tmp_path / "rank")
    for step, kind in enumerate([*kinds, *kinds]):
        kinds[kind]()
        kept.keep(step)
        expected = following()
        assert Generators(tmp_path / "rank").draw(step)
        assert following() == expected, kind
        assert Generators(tmp_path / "rank").draw(step)


def test_another_kind_of_generator_is_kept_too(tmp_path: Path) -> None:
    before = get_bit_generator()
    try:
        set_bit_generator(np.random.PCG64(3))
        kept = Generators(tmp_path / "rank")
        kept.keep(0)
        expected = draw()
        assert kept.draw(0)
        assert draw() == expected
    finally:
        set_bit_generator(before)


def test_a_torn_entry_is_none(tmp_path: Path) -> None:
    """Of a process that was killed while it wrote: the number comes last."""
    kept = Generators(tmp_path / "rank")
    kept.keep(0)
    kept._map[:8] = (-1).to_bytes(8, "little", signed=True)
    assert not Generators(tmp_path / "rank").draw(0)
