from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evener
from evener.core.losses import Loss, SumLoss, metric
from evener.errors import LossError

OUTPUTS, TARGETS = torch.randn(7, 3), torch.randn(7, 3)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def value(loss: Loss, outputs: Tensor = OUTPUTS, targets: Tensor = TARGETS) -> Tensor:
    """Over parts of unequal size, as ranks have them."""
    parts = list(zip(outputs.split([4, 0, 3]), targets.split([4, 0, 3]), strict=True))
    count = sum(float(loss.count(t)) for _, t in parts)
    total: Tensor = sum((loss.total(o, t) for o, t in parts), start=torch.zeros(()))
    return total / loss.divisor(count)


TORCHS = F.mse_loss(OUTPUTS, TARGETS)
CASES: dict[str, tuple[Loss, Tensor]] = {
    "by samples": (evener.loss(total=squares), TORCHS * 3),
    "counted": (evener.loss(total=squares, count=lambda targets: targets.numel()), TORCHS),
    "a plain sum": (evener.loss(total=squares, count="sum"), TORCHS * 21),
    "half of it": (evener.loss(total=squares, count="sum", scale=0.5), TORCHS * 10.5),
    "half the mean": (evener.loss(total=squares, scale=0.5), TORCHS * 1.5),
    "torch's, scaled": (evener.loss(nn.MSELoss(), scale=0.5), TORCHS * 0.5),
    "torch's function": (evener.loss(F.mse_loss, scale=-2), TORCHS * -2),
    "torch's sum": (evener.loss(nn.MSELoss(reduction="sum")), TORCHS * 21),
    "torch's sum over samples": (evener.loss(nn.MSELoss(reduction="sum"), count=len), TORCHS * 3),
    "torch's sum, said twice": (evener.loss(nn.MSELoss(reduction="sum"), count="sum"), TORCHS * 21),
    "a SumLoss, scaled": (evener.loss(SumLoss(count=len, total=squares), scale=3), TORCHS * 9),
    "scaled twice": (evener.loss(evener.loss(total=squares, scale=2), scale=2), TORCHS * 12),
}


@pytest.mark.parametrize("name", CASES)
def test_its_value_over_unequal_parts(name: str) -> None:
    loss, expected = CASES[name]
    torch.testing.assert_close(value(loss), expected)
    accumulator = metric(loss)
    accumulator.update(OUTPUTS, TARGETS)
    assert accumulator.compute() == pytest.approx(float(expected), rel=1e-5)


@dataclass
class Labels:
    name: str
    rows: Tensor


@pytest.mark.parametrize(
    "targets", [TARGETS, (None, TARGETS), {"names": ["a"], "rows": TARGETS}, [Labels("a", TARGETS)]], ids=type
)
def test_samples_are_the_rows_of_the_first_tensor(targets: Any) -> None:
    assert evener.loss(total=squares).count(targets) == 7


@pytest.mark.parametrize("targets", [torch.tensor(3.0), ["a", "b"], 3, None])
def test_targets_without_rows_need_a_count(targets: Any) -> None:
    with pytest.raises(LossError, match="give count="):
        evener.loss(total=squares).count(targets)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"total": nn.MSELoss}, "total is <class"),
        ({"total": 3}, "total is 3; give a function"),
        ({"total": squares, "count": 3}, 'count is 3; .*"sum" for a plain sum'),
        ({"total": squares, "count": "mean"}, "count is 'mean'"),
        ({"total": squares, "scale": "2"}, "scale is '2'; give a finite number"),
        ({"total": squares, "scale": float("nan")}, "scale is nan"),
        ({"total": squares, "scale": torch.ones(())}, "scale is tensor"),
        ({"total": nn.MSELoss(), "count": len}, r"MSELoss\(\) is a mean and knows its own count"),
    ],
)
def test_parts_of_a_wrong_kind_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(LossError, match=words):
        evener.loss(**arguments)


def test_it_is_sent_to_ranks_as_it_is() -> None:
    loss = evener.loss(nn.MSELoss(), scale=0.5)
    assert value(pickle.loads(pickle.dumps(loss))).equal(value(loss))
