"""Metrics of torchmetrics count each sample once in a prepared loop, or a warning says that they may not."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import evener
from tests.training.prepare.running import model_of, prepared, rows

torchmetrics = pytest.importorskip("torchmetrics")

SAMPLES = 26


def counted(
    is_prepared: bool, gathers: bool, size: int = 5
) -> tuple[list[list[int]], float, list[list[int]], list[str]]:
    """Returns values of two metrics, that of the first one for fewer batches after a reset, and warnings."""
    torch.manual_seed(4)
    model, loader = model_of(), DataLoader(rows(SAMPLES), batch_size=size)
    if is_prepared:
        model, loader = evener.prepare(model, loader)
    matrix, number = torchmetrics.ConfusionMatrix("multiclass", num_classes=3), torchmetrics.SumMetric()
    found = []
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for batches in (99, 3):
            matrix.reset()
            for at, (x, y) in enumerate(loader):
                outputs = model(x)
                if is_prepared and gathers:
                    outputs, y = evener.gather((outputs, y))
                if at < batches:
                    matrix.update(outputs, y)
                    number.update(float(len(y)))
            found.append(matrix.compute().tolist())
    return found[0], float(number.compute()), found[1], [str(each.message) for each in told]


@pytest.mark.parametrize("balance", ["equal", "3,1", "1,0"])
def test_gathered_rows_count_once(ranks: Any, balance: str) -> None:
    *expected, _ = counted(False, True)
    answers = ranks(2).run(partial(prepared, balance=balance), counted, True)
    for *found, _ in answers:
        assert found == expected
    for *_, told in answers[:1]:
        assert any("ConfusionMatrix has the same state on all ranks" in each for each in told)
    assert not any("metric" in each for each in answers[1][-1])


@pytest.mark.parametrize("size", [13, 5])
def test_rows_of_ranks_are_added_up(ranks: Any, size: int) -> None:
    """In batches of 5, a rank has no sample of the last batch."""
    *expected, _ = counted(False, False, size)
    first, second = ranks(2).run(partial(prepared, balance="equal"), counted, False, size)
    assert first[:3] == second[:3]
    assert (list(first[:3]) == expected) is (size == 13)
    assert any("had none of a batch" in each for each in first[3]) is (size == 5)


def test_metrics_are_left_as_they_were(ranks: Any) -> None:
    before = torchmetrics.Metric.sync
    prepared(counted, True, device="cpu")
    assert torchmetrics.Metric.sync is before
