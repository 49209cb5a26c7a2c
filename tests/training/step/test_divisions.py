"""Ranks that pad their samples to lengths of their own, in the step of a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import evener
from evener.data.batch import MicroBatch
from evener.errors import LossError
from evener.training.engine import Engine
from evener.training.step.divisions import check_widths, width_of

LENGTHS = (5, 2, 3, 1, 4, 4, 6, 1)


def filled(items: Any) -> Any:
    """Returns inputs, and targets of which what is filled in is NaN."""
    inputs = pad_sequence([x for x, _ in items], batch_first=True)
    return inputs, pad_sequence([y for _, y in items], batch_first=True, padding_value=torch.nan)


def squares(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).nan_to_num(0).square().sum()


def numbers(y: Tensor) -> Tensor:
    return (~y.isnan()).sum()


def filled_with_zeros(items: Any) -> Any:
    return tuple(each.nan_to_num(0) for each in filled(items))


def task(loss: Any) -> evener.Task:
    drawn = torch.Generator().manual_seed(3)
    data = [(torch.randn(n, 3, generator=drawn), torch.randn(n, generator=drawn)) for n in LENGTHS]
    return evener.Task(
        model=lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(1)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=data,
        order=lambda _: range(len(LENGTHS)),
        collate=filled_with_zeros if isinstance(loss, nn.Module) else filled,
        batch_size=4,
    )


def said(loss: Any, **settings: Any) -> Any:
    try:
        with Engine(task(loss), device="cpu", dtype="float64", **settings) as engine:
            return [engine.step(batch).loss for batch in engine.batches()]
    except LossError as error:
        return str(error)


def evaluated(metric: Any, **settings: Any) -> Any:
    told = replace(task(metric), loss=MEAN, metrics={"found": metric})
    try:
        with Engine(told, device="cpu", dtype="float64", **settings) as engine:
            return engine.evaluate(told.train)["found"]
    except LossError as error:
        return str(error)


MEAN = evener.loss(total=squares, count=numbers)


def test_a_mean_over_what_is_filled_in_is_refused(ranks: Any) -> None:
    for message in ranks(2).run(said, nn.MSELoss(), balance="3,1"):
        assert "a sample has 5 on rank 0, 1 on rank 1: the collate function fills up to" in message


def test_a_mean_over_the_rest_is_that_of_one_rank(ranks: Any) -> None:
    for losses in ranks(2).run(said, MEAN, balance="3,1"):
        assert losses == pytest.approx(said(MEAN), rel=1e-12)


def test_a_sum_may_be_over_any_number_of_elements(ranks: Any) -> None:
    for losses in ranks(2).run(said, nn.MSELoss(reduction="sum"), balance="3,1"):
        assert len(losses) == 2


def test_a_metric_is_refused_as_a_loss_is(ranks: Any) -> None:
    for message in ranks(2).run(evaluated, nn.MSELoss(), balance="3,1"):
        assert "metric is a mean over all elements, and a sample has 5 on rank 0, 1 on rank 1" in message
    for found in ranks(2).run(evaluated, MEAN, balance="3,1"):
        assert found == pytest.approx(evaluated(MEAN), rel=1e-12)


def test_a_rank_without_samples_has_no_width() -> None:
    check_widths([3.0, 0.0, 3.0])
    with pytest.raises(LossError, match="3 on rank 0, 4 on rank 2"):
        check_widths([3.0, 0.0, 4.0])


@pytest.mark.parametrize(
    ("targets", "width"), [(torch.zeros(2, 3), 3.0), (torch.tensor(1.0), 1.0), ({"y": torch.zeros(2)}, 0.0)]
)
def test_targets_of_one_number_have_a_width_and_a_dict_has_none(targets: Any, width: float) -> None:
    assert width_of([MicroBatch(None, targets, torch.arange(2), 1)]) == width
