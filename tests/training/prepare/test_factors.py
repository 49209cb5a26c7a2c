"""Numbers of one rank with which a line of the loop multiplies or divides ``loss.item()``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import evener
from evener.training.prepare.factors import factors_at
from tests.training.prepare.running import model_of, rows, with_settings


class Number:
    """Remembers what was found in the line that asks for it."""

    def __init__(self, dim: int = 0) -> None:
        self.dim = dim

    def item(self) -> float:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        self.found = factors_at(frame.f_back, self.dim)
        return 1.5


def sum_over_an_epoch(number: Any, x: Any) -> None:
    total = 0.0
    total += number.item() * x.size(0)


def on_two_lines(number: Any, x: Any) -> str:
    # fmt: off
    return "{:.2f} {}".format(number.item() /
                              len(x), number.item)
    # fmt: on


def by_a_variable(number: Any, x: Any) -> float:
    count = x.shape[0]
    found: float = 100.0 * number.item() * count / 7
    return found


def by_unpacking(number: Any, x: Any) -> float:
    many, _ = x.shape
    found: float = many * number.item()
    return found


def by_a_constant(number: Any, x: Any) -> float:
    accumulated = 6
    found: float = number.item() * accumulated
    return found


def divisor(number: Any, x: Any) -> float:
    found: float = len(x) / number.item()
    return found


def added(number: Any, x: Any) -> float:
    found: float = (number.item() + 1) * len(x)
    return found


def by_the_rows_of_a_list(number: Any, x: Any) -> float:
    of_list = list(x)
    found: float = number.item() * len(of_list)
    return found


def by_the_second_dimension(number: Any, x: Any) -> float:
    found: float = number.item() * x.size(1) * len(x)
    return found


def into_a_meter(number: Any, x: Any) -> float:
    meter = Meter()
    meter.update(number.item(), x.size(0))
    return meter.sum


def into_a_meter_by_name(number: Any, x: Any) -> float:
    n = len(x)
    meters = {"loss": Meter()}
    meters["loss"].update(0.5 * number.item(), n=n)
    return meters["loss"].sum


def told(number: Any, x: Any) -> str:
    return f"loss {number.item()}, {len(x)} samples"


class Meter:
    """An average over an epoch, as many loops have it."""

    sum = 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (sum_over_an_epoch, [("mul", 6)]),
        (on_two_lines, [("div", 6)]),
        (by_a_variable, [("mul", 6)]),
        (by_unpacking, [("mul", 6)]),
        (into_a_meter, [("mul", 6)]),
        (into_a_meter_by_name, [("mul", 6)]),
        (told, []),
        (by_a_constant, []),
        (divisor, []),
        (added, []),
        (by_the_rows_of_a_list, []),
    ],
)
def test_the_line_tells_what_a_number_is_multiplied_by(
    line: Callable[..., Any], expected: list[tuple[str, int]]
) -> None:
    number = Number()
    line(number, torch.zeros(6, 2))
    assert number.found == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (by_the_second_dimension, [("mul", 2)]),
        (sum_over_an_epoch, []),
        (by_a_variable, []),
        (by_unpacking, []),
    ],
)
def test_where_samples_come_second_rows_are_no_number_of_them(
    line: Callable[..., Any], expected: list[tuple[str, int]]
) -> None:
    number = Number(dim=1)
    line(number, torch.zeros(6, 2))
    assert number.found == expected


def test_a_line_without_source_tells_nothing() -> None:
    number = Number()
    exec("found = number.item() * len(x)", {"number": number, "x": torch.zeros(6)})
    assert number.found == []


def epoch(reduction: str, is_right: bool) -> list[str]:
    """The messages of a loop that sums means, or divides sums, on ranks with equal shares."""
    with with_settings(balance="equal"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(rows(12), batch_size=6)
        loss, loader, model = evener.prepare(nn.CrossEntropyLoss(reduction=reduction), loader, model_of())
        total = 0.0
        for x, y in loader:
            value = loss(model(x), y)
            if is_right:
                total += value.item() * evener.batch_size() if reduction == "mean" else value.item()
            elif reduction == "mean":
                total += value.item() * x.size(0)
            else:
                total += float(value) / len(x)
        return [f"{Path(each.filename).name} {each.message}" for each in caught]


@pytest.mark.parametrize(("reduction", "words"), [("mean", "is multiplied by 3"), ("sum", "is divided by 3")])
def test_a_number_of_one_rank_is_told_though_all_have_it(ranks: Any, reduction: str, words: str) -> None:
    for said in ranks(2).run(epoch, reduction, False):
        told = [each for each in said if words in each and "evener.batch_size()" in each]
        assert told, said
        assert all(each.startswith("test_factors.py") for each in told), told
    assert ranks(2).run(epoch, reduction, True) == [[], []]


def by_time(is_right: bool) -> list[str]:
    """The messages of a loop over batches of two steps in time, on ranks with two sequences each."""
    with with_settings(balance="equal"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, model = evener.prepare(nn.CrossEntropyLoss(), model_of())
        inputs, targets = torch.ones(2, 4, 4).double(), torch.ones(2, 4).long()
        with evener.batch(inputs, targets, dim=1) as (x, y):
            value = loss(model(x).flatten(0, 1), y.flatten())
            total = value.item() * len(x) if is_right else value.item() * x.shape[1]
        assert total > 0
        return [str(each.message) for each in caught]


def test_a_number_of_steps_in_time_is_not_taken_for_samples(ranks: Any) -> None:
    assert ranks(2).run(by_time, True) == [[], []]
    for said in ranks(2).run(by_time, False):
        assert any("is multiplied by 2" in each for each in said), said
