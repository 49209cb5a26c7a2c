from __future__ import annotations

import random

import numpy as np
import torch

from evener.hardware.generators import seed_of, seeded


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_numbers_depend_on_the_seed_alone_and_leave_nothing() -> None:
    before = torch.get_rng_state()
    with seeded(seed_of(1, 2, 3)):
        first = drawn()
    torch.rand(5), np.random.rand(5), random.random()
    after = torch.get_rng_state()
    with seeded(seed_of(1, 2, 3)):
        again = drawn()
    assert first == again
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(before, after)


def test_what_is_drawn_in_a_block_changes_nothing_outside() -> None:
    """Normal numbers too, which NumPy draws in pairs; and blocks can be nested."""

    def after(inside: int) -> list[float]:
        np.random.seed(7)
        with seeded(1):
            np.random.randn(inside)
            with seeded(2):
                np.random.randn(inside)
            nested = np.random.rand()
            with seeded(1):
                np.random.randn(inside)
                assert nested == np.random.rand()
        return np.random.randn(3).tolist()

    assert after(1) == after(2) == after(0)


def test_seeds_are_far_apart() -> None:
    seeds = {seed_of(a, b, c) for a in range(10) for b in range(10) for c in (-1, 0, 1, 10**12)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
