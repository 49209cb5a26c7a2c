"""Ranks that are about to train different things find out before anything travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.config import RunConfig
from evener.engine import Engine
from evener.equality import check_equal
from evener.errors import ConfigurationError
from tests import tasks


def rank() -> int:
    return torch.distributed.get_rank()


def data(size: int) -> TensorDataset:
    return TensorDataset(torch.zeros(size, 6), torch.zeros(size).long())


def train_rows() -> Any:
    return tasks._task(train=data(158 + 2 * rank()))


def evaluation_rows() -> Any:
    return tasks._task(evaluate=data(10 + rank()))


def widths() -> Any:
    return tasks._task(model=lambda: nn.Sequential(nn.Linear(6, 8 + rank()), nn.Linear(8 + rank(), 3)))


def frozen() -> Any:
    def model() -> nn.Module:
        built = tasks.plain().model()
        next(built.parameters()).requires_grad_(rank() == 0)
        return built

    return tasks._task(model=model)


def same() -> Any:
    return tasks.plain()


def refused(name: str, config: dict[str, list[Any]]) -> str:
    own = {key: values[rank()] for key, values in config.items()}
    try:
        with Engine(globals()[name](), RunConfig(device="cpu", steps=1, **own)):
            return "nothing was said"
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("train_rows", {}, "length of the training set is 158 on ranks 0, 1, 160 on rank 2"),
        ("evaluation_rows", {}, "length of the evaluation set is 10 on rank 0, 11 on rank 1, 12 on rank 2"),
        ("widths", {}, "names, types and shapes of the model's tensors"),
        ("frozen", {}, "names, types and shapes of the model's tensors"),
        ("same", {"seed": [0, 0, 1]}, "setting seed is 0 on ranks 0, 1, 1 on rank 2"),
        ("same", {"batch_size": [8, 9, 8]}, "setting batch_size is 8 on ranks 0, 2, 9 on rank 1"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_named_on_every_rank(
    ranks: Any, name: str, config: dict[str, list[Any]], words: str
) -> None:
    if name == "train_rows":
        config = config | {"seed": [0, 0, 0]}
    for message in ranks(3).run(refused_for_two if name == "train_rows" else refused, name, config):
        assert "the ranks do not train the same" in message
        assert words in message


def refused_for_two(name: str, config: dict[str, list[Any]]) -> str:
    """Rows of 158, 158 and 160."""
    try:
        rows = data(160 if rank() == 2 else 158)
        with Engine(tasks._task(train=rows), RunConfig(device="cpu", steps=1)):
            return "nothing was said"
    except ConfigurationError as error:
        return str(error)


def test_what_machines_may_have_of_their_own_is_not_compared(ranks: Any) -> None:
    config = {"workers": [0, 1], "run_dir": ["a", "b"]}
    assert ranks(2).run(refused, "same", config) == ["nothing was said"] * 2


def test_many_ranks_are_told_in_short() -> None:
    facts = [{"x": 1}] * 50 + [{"x": 2}]
    with pytest.raises(ConfigurationError, match=r"x is 1 on ranks 0, 1, 2, 3, \.\.\., 2 on rank 50"):
        check_equal(facts)
    check_equal(facts[:50])
