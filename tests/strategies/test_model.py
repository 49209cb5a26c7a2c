"""The model of a rank, as it is built."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

from evener.errors import InterruptedRunError
from evener.runtime.interrupt import raising
from evener.strategies.model import build_on_meta
from tests import tasks


def with_numbers() -> nn.Module:
    model = nn.Linear(6, 3)
    float(model.weight.sum())
    return model


def interrupted() -> nn.Module:
    signal.raise_signal(signal.SIGTERM)
    return nn.Linear(6, 3)


def test_a_model_that_computes_with_numbers_is_built_for_real() -> None:
    assert build_on_meta(tasks._task(model=with_numbers), 0) is None
    built = build_on_meta(tasks.plain(), 0)
    assert built is not None
    assert {p.device for p in built.parameters()} == {torch.device("meta")}


def test_a_signal_says_nothing_of_the_model() -> None:
    with (
        pytest.raises(InterruptedRunError),
        raising([signal.SIGTERM], lambda: "the start"),
    ):
        build_on_meta(tasks._task(model=interrupted), 0)
