from __future__ import annotations

import importlib
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.core.losses import Accumulator, Sum, accuracy, metric
from evener.errors import ConfigurationError, LossError

SHARES = [3, 0, 20, 7, 1]


def tm() -> Any:
    """torchmetrics: its import takes seconds, which those who collect this file or run another test need not wait."""
    return importlib.import_module("torchmetrics")


def test_sums_add_up_and_have_a_mean() -> None:
    total = Sum(3.0, 2) + Sum(torch.tensor(4.0), torch.tensor(5))
    assert total.mean == 1.0
    assert math.isnan(Sum(0.0, 0).mean)


def test_accuracy_counts_what_is_not_ignored() -> None:
    outputs = torch.eye(4)[:, :, None].expand(4, 4, 2)
    targets = torch.tensor([[0, 0], [1, 9], [2, 9], [0, 3]])
    assert accuracy(outputs, targets).mean == 5 / 8
    assert accuracy(outputs, targets, ignore_index=9).mean == 5 / 6
    assert accuracy(torch.eye(3), torch.eye(3)).mean == 1.0
    with pytest.raises(LossError, match=r"shape \(4, 2\); they are of shape \(4,\)"):
        accuracy(outputs, targets[:, 0])


@pytest.mark.parametrize("shape", [(6, 1), (6,), (6, 1, 3)])
def test_the_largest_of_one_score_is_no_accuracy(shape: tuple[int, ...]) -> None:
    """It would be the first class for each sample, and right for all of them with targets of the same shape."""
    with pytest.raises(LossError, match="no score for each of several classes"):
        accuracy(torch.randn(shape), torch.ones(shape))


def ours(outputs: Tensor, targets: Tensor) -> Sum:
    return Sum((outputs.argmax(1) == targets).sum(), targets.numel())


def collection() -> Any:
    return tm().MetricCollection(
        {
            "accuracy": tm().Accuracy(task="multiclass", num_classes=3),
            "precision": tm().Precision(task="multiclass", num_classes=3, average="macro"),
            "recall": tm().Recall(task="multiclass", num_classes=3, average="macro"),
        }
    )


def regression(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[:, 0], targets.float() + outputs[:, 1]


SOURCES: dict[str, tuple[Callable[[], Any], Any]] = {
    "function": (lambda: ours, None),
    "accuracy": (lambda: accuracy, None),
    "loss": (nn.CrossEntropyLoss, None),
    "loss, sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), None),
    "torchmetrics accuracy": (lambda: tm().Accuracy(task="multiclass", num_classes=3), None),
    "torchmetrics mse": (lambda: tm().MeanSquaredError(), regression),
    "torchmetrics auroc": (lambda: tm().AUROC(task="multiclass", num_classes=3), None),
    "torchmetrics pearson": (lambda: tm().PearsonCorrCoef(), regression),
    "torchmetrics minimum": (lambda: tm().MinMetric(), lambda outputs, targets: (outputs,)),
    "torchmetrics collection": (collection, None),
    "torchmetrics wrapper": (
        lambda: tm().wrappers.ClasswiseWrapper(tm().Accuracy(task="multiclass", num_classes=3, average=None)),
        None,
    ),
}


class FirstOnly:
    """Makes a metric of one value accept (outputs, targets)."""

    def __init__(self, accumulator: Accumulator, change: Any) -> None:
        self.accumulator, self.change = accumulator, change

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        pair = self.change(outputs, targets) if self.change else (outputs, targets)
        if len(pair) == 1:
            self.accumulator._metric.update(*pair)  # type: ignore[attr-defined]
        else:
            self.accumulator.update(*pair)


@pytest.mark.parametrize("name", SOURCES)
def test_the_value_does_not_depend_on_the_division(name: str) -> None:
    torch.manual_seed(1)
    make, change = SOURCES[name]
    outputs, targets = torch.randn(sum(SHARES), 3).softmax(1), torch.randint(3, (sum(SHARES),))
    whole = metric(make())
    FirstOnly(whole, change).update(outputs, targets)
    parts = [metric(make()) for _ in SHARES]
    for part, o, t in zip(parts, outputs.split(SHARES), targets.split(SHARES), strict=True):
        for half in (0, 1):
            if len(o[half::2]):
                FirstOnly(part, change).update(o[half::2], t[half::2])
    states = [pickle.loads(pickle.dumps(part.state())) for part in parts]
    for part in parts:
        part.merge(states)
        assert part.compute() == pytest.approx(whole.compute(), rel=1e-5)
    whole.reset()
    whole.merge([whole.state()])
    assert whole.compute() != whole.compute(), "nothing seen is nan"


def two_thresholds() -> Any:
    """Metrics that agree on outputs of 0 and 1: torchmetrics would take them for one ever after."""
    return tm().MetricCollection(
        {
            "low": tm().Accuracy(task="binary", threshold=0.2),
            "high": tm().Accuracy(task="binary", threshold=0.8),
        }
    )


WRAPPED: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "collection": (two_thresholds, lambda x: x),
    "collection in a wrapper": (
        lambda: tm().wrappers.MultitaskWrapper({"task": two_thresholds()}),
        lambda x: {"task": x},
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_metrics_that_agree_in_a_first_batch_are_not_one(name: str) -> None:
    make, wrap = WRAPPED[name]
    outputs, targets = torch.tensor([0.0, 1.0, 0.5, 0.5]), torch.tensor([0, 1, 1, 1])
    values = []
    for division in ([4, 0], [0, 4], [2, 2]):
        ranks = [metric(make()) for _ in division]
        parts = zip(ranks, outputs.split(division), targets.split(division), strict=True)
        for rank, o, t in parts:
            for i in range(len(o)):
                rank.update(wrap(o[i : i + 1]), wrap(t[i : i + 1]))
        states = [rank.state() for rank in ranks]
        for rank in ranks:
            rank.merge(states)
            values.append(rank.compute())
    expected = wrap({"low": 1.0, "high": 0.5})
    assert values == [expected] * 6


def test_a_torchmetrics_object_of_the_users_is_left_alone() -> None:
    source = tm().Accuracy(task="multiclass", num_classes=3)
    copy = metric(source)
    copy.update(torch.eye(3), torch.arange(3))
    assert source._update_count == 0
    assert source.sync_on_compute


def test_a_loss_as_metric_is_its_mean() -> None:
    outputs, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, -100, 0])
    accumulator = metric(nn.CrossEntropyLoss())
    accumulator.update(outputs[:2], targets[:2])
    accumulator.update(outputs[2:], targets[2:])
    assert accumulator.compute() == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)))


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no metric"):
        metric(3)
    with pytest.raises(ConfigurationError, match=r"returned Tensor; return evener\.Sum"):
        metric(lambda outputs, targets: outputs.mean()).update(torch.ones(2), torch.ones(2))
