from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from evener.cli.verify import text
from evener.config import RunConfig
from evener.errors import ConfigurationError, ShareError
from evener.verification import Trajectory, _compare, relative_error, verify
from tests import tasks

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


def trajectory(
    weight: float = 1.0, digest: str = "d", losses: Any = (1.0, 0.5), dropouts: int = 0
) -> Trajectory:
    weights = {"w": torch.tensor([weight, 2.0]), "mask": torch.tensor([-INF])}
    return Trajectory(list(losses), weights, digest, dropouts)


def compared(*divided: Trajectory, reference: Trajectory | None = None) -> Any:
    config = RunConfig(dtype="float64", batch_size=4)
    return _compare(reference or trajectory(), list(divided), config, "name", 1e-9)


def test_what_passes_and_what_does_not() -> None:
    good = compared(trajectory(), trajectory())
    assert good.passed
    assert good.hint == ""
    assert good.max_relative_weight_error == 0
    wrong = compared(trajectory(1.5), trajectory(1.5))
    assert (wrong.passed, wrong.worst_parameter, wrong.max_relative_weight_error) == (False, "w", 0.25)
    assert "a loss that compares samples" in wrong.hint
    different = compared(trajectory(), trajectory(digest="other"))
    assert not different.passed
    assert "the replicas differ" in different.hint
    assert not compared(trajectory(losses=(1.0,)), trajectory(losses=(1.0,))).passed
    assert not compared(trajectory(NAN), trajectory(NAN)).passed
    dropout = compared(trajectory(1.5), reference=trajectory(dropouts=2))
    assert "2 dropout layers of torch.nn" in dropout.hint


def test_the_worst_loss_is_not_hidden_by_one_that_is_not_a_number() -> None:
    found = compared(trajectory(losses=(NAN, 0.4)), reference=trajectory(losses=(NAN, 0.5)))
    assert found.max_relative_loss_error == pytest.approx(0.2)
    assert math.isnan(compared(trajectory(losses=(1.0, NAN))).max_relative_loss_error)


def test_a_verification_on_two_processes() -> None:
    """Batches of 9 out of 47, so that the last one of an epoch has 2 samples; BatchNorm; layouts."""
    result = verify(tasks.batch_norm, processes=2, balance="0.9,0.1", steps=7, device="cpu")
    assert result.passed
    assert result.replicas_identical
    assert result.max_relative_weight_error <= 1e-12
    assert (result.dtype, result.processes, result.shares, result.steps) == ("float64", 2, "0.9,0.1", 7)
    assert (result.batch_size, len(result.losses)) == (9, 7)
    assert result.losses == pytest.approx(result.reference_losses, rel=1e-12)
    assert {"0.weight", "1.running_mean", "1.num_batches_tracked"} <= result.weight_errors.keys()
    assert "same training" in text(result)
    assert json.loads(json.dumps(dataclasses.asdict(result)))["passed"] is True


def test_what_cannot_be_verified() -> None:
    with pytest.raises(ConfigurationError, match="nothing to verify with 1 process"):
        verify("digits", processes=1, device="cpu")
    with pytest.raises(ShareError):
        verify("digits", processes=2, device="cpu", balance="1,1,1")
