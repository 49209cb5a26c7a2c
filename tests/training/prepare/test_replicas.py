"""Ranks of a prepared loop whose weights come apart say so, with the first tensor that differs."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import evener
from evener.training.prepare import replicas as comparing
from tests.ids import placeless
from tests.training.prepare.running import Loop, said
from tests.training.prepare.test_silent_errors import steps


def a_weight_written_on_one_rank(_: bool) -> None:
    loop = Loop(True)
    with patch.object(comparing, "steps_between", lambda *_: 4):  # not by the time that it takes
        for _ in range(6):
            steps(loop)
            if evener.is_main():
                loop.model[2].bias.data[1] += 1e-9


def a_buffer_written_on_one_rank(_: bool) -> None:
    """Of a BatchNorm, which ranks keep equal by themselves, by a pass of one of them."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    loop = Loop(True, model=model)
    if evener.is_main():
        loop.model(torch.rand(3, 4, dtype=torch.float64))
    steps(loop)


def a_weight_written_on_one_rank_before_a_save(_: bool) -> None:
    loop = Loop(True)
    steps(loop)
    if not evener.is_main():
        loop.model[2].bias.data[1] += 1e-9
    with TemporaryDirectory() as place:
        try:
            evener.save(Path(place) / "loop.pt", model=loop.model)
        finally:
            assert not any(Path(place).iterdir())


def an_update_by_hand_in_a_hook(_: bool) -> None:
    """Without an optimizer, by what comes through a layer: no gradient of a parameter is looked at."""
    loop = Loop(True)

    def update(module: nn.Module, _: Any, gradients: Any) -> None:
        with torch.no_grad():
            module.bias.sub_(0.1 * gradients[0].sum(0))

    loop.model[2].register_full_backward_hook(update)
    steps(loop)


def a_weight_of_the_next_model_written_on_one_rank(_: bool) -> None:
    """As in the second fold of a cross-validation, which adds its model to the first one's preparation."""
    for fold in range(2):
        loop = Loop(True)
        steps(loop, 1)
        if fold and evener.is_main():
            loop.model[2].bias.data[1] += 1e-9
        steps(loop, 2)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            a_weight_of_the_next_model_written_on_one_rank,
            r"after 5 updates 1.2.bias is not on rank 1 .* after 3\.",
        ),
        (
            a_weight_written_on_one_rank,
            r"after \d+ updates 2.bias is not on rank 1 what it is on rank 0.*last seen equal after 1\.",
        ),
        (a_weight_written_on_one_rank_before_a_save, r"updates 2.bias is not on rank 1 what it is on rank 0"),
        (a_buffer_written_on_one_rank, r"after 1 updates 1.running_mean, one of 3 that differ,"),
        (an_update_by_hand_in_a_hook, "after 1 updates 2.bias is not on rank 1 what it is on rank 0"),
    ],
    ids=placeless,
)
def test_ranks_that_hold_different_numbers_are_refused(ranks: Any, loop: Any, words: str) -> None:
    for message in ranks(2).run(said, loop, balance="3,1"):
        assert re.search(words, message), message
