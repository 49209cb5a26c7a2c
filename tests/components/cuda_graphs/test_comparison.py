"""What counts as a difference between a replay and an eager pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evener.components.cuda_graphs.comparison import difference

VALUES = {"the loss": torch.tensor(3.0), "w": torch.arange(4.0), "b": torch.tensor([1e-9])}


def changed(name: str, by: float) -> dict[str, Tensor | None]:
    return {**VALUES, name: VALUES[name] * (1 + by)}


def test_equal_results_are_equal() -> None:
    assert difference(VALUES, dict(VALUES), dict(VALUES)) == ""


def test_a_difference_beyond_rounding_is_named() -> None:
    found = difference(VALUES, changed("w", 1e-3), changed("w", 1e-3))
    assert found.startswith("w, by 1.0e-03")


def test_rounding_is_allowed() -> None:
    assert difference(VALUES, changed("w", 1e-6), changed("w", 1e-6)) == ""


def test_gradients_that_cancel_are_measured_by_the_whole() -> None:
    assert difference(VALUES, changed("b", 0.5), changed("b", 0.5)) == ""


def test_what_two_replays_differ_an_eager_pass_may_differ() -> None:
    assert difference(VALUES, changed("w", 1e-3), changed("w", 0.6e-3)) == ""


def test_replays_that_are_far_apart_excuse_nothing() -> None:
    assert difference(VALUES, changed("w", 0.5), changed("w", -0.5)).startswith("w, by 5.0e-01")


def test_nothing_is_allowed_with_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert difference(VALUES, changed("w", 1e-6), changed("w", 1e-6)).startswith("w")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("other", [True, False])
def test_a_gradient_of_one_of_them_alone_is_named(other: bool) -> None:
    less = {**VALUES, "w": None}
    found = difference(less, VALUES, VALUES) if other else difference(VALUES, less, less)
    assert found == f"w, which only {'the replay' if other else 'the eager pass'} computes"


def test_a_loss_that_is_not_finite_is_found_by_the_run() -> None:
    worse = {name: value * torch.nan for name, value in VALUES.items()}
    assert difference(worse, dict(worse), dict(worse)) == ""


def test_a_replay_that_is_not_finite_is_a_difference() -> None:
    worse = {name: value * torch.nan for name, value in VALUES.items()}
    assert difference(VALUES, worse, worse) != ""
