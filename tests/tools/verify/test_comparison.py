from __future__ import annotations

import math

import pytest
import torch

from evener.errors import ConfigurationError
from evener.tools.verify import relative_error
from evener.tools.verify.comparison import LIMIT
from tests.tools.verify.runs import EPS, compared, disturbed, run, scaled, vector

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.0], [1.5, -2.0], 0.25),
        ([0.0, 0.0], [0.0, 3.0], 3.0),
        ([], [], 0.0),
        ([1.0, -INF], [1.0, -INF], 0.0),
        ([4.0, INF, NAN], [2.0, INF, NAN], 0.5),
        ([1.0, NAN], [1.0, 2.0], NAN),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, 2.0], [1.0, INF], INF),
    ],
)
def test_relative_error(a: list[float], b: list[float], error: float) -> None:
    found = relative_error(torch.tensor(a), torch.tensor(b))
    assert found == pytest.approx(error, nan_ok=True)


def test_relative_error_of_numbers_that_are_not_floating() -> None:
    assert relative_error(torch.tensor([4, 2]), torch.tensor([4, 1])) == 0.25
    assert relative_error(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0
    assert relative_error(torch.tensor([4 + 2j]), torch.tensor([4 + 1j])) == 0.25


def test_what_rounding_explains_passes() -> None:
    found = compared(disturbed(12))
    assert found.passed
    assert found.hint == ""
    assert found.times_floor == pytest.approx(3, rel=0.01)
    assert found.max_relative_weight_error == pytest.approx(12 * EPS)
    assert found.floor == pytest.approx(4 * EPS)
    assert found.judged_absolutely == ["key"]
    assert (found.limit, found.tolerance) == (LIMIT, None)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"fc.weight": vector(1.0)}, r"fc.weight has the shape \(2,\) .* one of shape \(1,\)"),
        ({"fc.weight": vector(1.0, 2.0), "mean": vector(1.0)}, "key has the shape .* no such tensor"),
    ],
)
def test_a_slice_is_not_compared_with_the_whole(weights: dict[str, torch.Tensor], words: str) -> None:
    """A slice of one element would be compared with each of the whole."""
    with pytest.raises(ConfigurationError, match=words):
        compared(run(weights=weights))


def test_what_rounding_does_not_explain_fails() -> None:
    found = compared(disturbed(4 * LIMIT + 8))
    assert not found.passed
    assert found.times_floor > LIMIT
    assert compared(disturbed(4 * LIMIT - 8)).passed


def test_a_key_bias_of_adam_may_go_anywhere_within_its_steps() -> None:
    """Its relative error is 2, which does not count, and is told by name all the same."""
    found = compared(run(weights=run().weights | {"key": vector(-0.1)}))
    assert found.passed
    assert found.max_relative_weight_error == 0
    assert found.weight_errors["key"] == 2


def test_a_gradient_that_should_be_zero_and_is_not_is_found() -> None:
    gradients = [sketches | {"key": vector(1e-9)} for sketches in run().gradients]
    found = compared(run(gradients=gradients))
    assert not found.passed
    assert found.worst == "the gradient of key in step 1"
    assert found.times_floor_by_kind["weight"] == 0


def test_a_wrong_gradient_is_found_though_weights_and_losses_agree() -> None:
    """Adam takes the same steps for gradients of half the size."""
    found = compared(scaled(0.5))
    assert not found.passed
    assert found.max_relative_weight_error == 0
    assert set(found.times_floor_by_kind) == {"loss", "statistic", "gradient", "weight", "buffer"}


def test_replicas_and_steps_must_be_the_same() -> None:
    assert not compared(run(), run(digest="other")).passed
    assert compared(run(), run()).passed
    assert not compared(run(losses=[1.0])).passed


def test_what_is_not_a_number_never_passes() -> None:
    assert not compared(run(weights=run().weights | {"fc.weight": vector(NAN, 2.0)})).passed
    assert not compared(run(losses=[1.0, NAN])).passed


def test_a_tolerance_takes_the_place_of_the_floor() -> None:
    wrong = run(weights=run().weights | {"fc.weight": vector(1.0, 2.5)})
    assert not compared(wrong).passed
    assert compared(wrong, tolerance=0.3).passed
    assert not compared(wrong, tolerance=0.2).passed
    assert "the tolerance that was given is smaller" in compared(disturbed(), tolerance=1e-20).hint


def test_the_worst_loss_is_not_hidden_by_one_that_is_not_a_number() -> None:
    found = compared(run(losses=[NAN, 0.4]), reference=run(losses=[NAN, 0.5]))
    assert found.max_relative_loss_error == pytest.approx(0.2)
    assert math.isnan(compared(run(losses=[1.0, NAN])).max_relative_loss_error)
