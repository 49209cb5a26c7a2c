"""Ranks that meet in their passes take equally many pieces, each of a size that it has room for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.errors import ConfigurationError
from evener.nn import data_group
from evener.training.engine import Engine
from tests.strategies.hungry import BATCH, room_for, same, task, trained, unlimited
from tests.tiers import ALWAYS, NIGHTLY, spread


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"strategy": "sharded", "balance": "auto"}, id="sharded"),
        pytest.param({"strategy": "sharded", "strategy_option": ("zero=1",), "balance": "1,2"}, id="zero=1"),
        pytest.param(
            {"strategy": "sharded", "strategy_option": ("zero=2",), "balance": "1,5"},
            id="zero=2",
            marks=NIGHTLY,
        ),
        pytest.param({"strategy": "tensor"}, id="tensor"),
    ],
)
def test_unequal_limits_change_no_number(ranks: Any, settings: dict[str, Any]) -> None:
    free, limits = trained(), f"{room_for(9)},{room_for(4)}"
    told, _ = both = ranks(2).run(trained, micro_batch="auto", memory_limit=limits, **settings)
    for found in both:
        same(free, found)
        first, second = found["pieces"][-1]
        assert 0 < second < (first or BATCH)
        assert not any(map(sum, found["retries"]))
    assert any("rank 1 takes pieces of" in words for words in told["told"])


@pytest.mark.parametrize("balance", spread(["1,0", "0,1", "22,2"], NIGHTLY, ALWAYS, NIGHTLY))
def test_ranks_without_samples_take_part(ranks: Any, balance: str) -> None:
    free = unlimited()
    settings = {"strategy": "sharded", "balance": balance, "memory_limit": str(room_for(10))}
    for found in ranks(2).run(trained, micro_batch="auto", **settings):
        same(free, found)


def test_a_limit_that_is_lowered_is_followed_by_all(ranks: Any) -> None:
    free, least = unlimited(), room_for(4)
    settings = {"strategy": "sharded", "memory_limit": str(2 * least), "memory_limit_at": (f"5:1:{least}",)}
    for found in ranks(2).run(trained, micro_batch="auto", **settings):
        same(free, found)
        before, after = (
            [pieces[1] if pieces else 0 for pieces in part]
            for part in (found["pieces"][1:5], found["pieces"][5:])
        )
        assert max(after) < (min(before) or BATCH)
        assert min(after) > 0


# What cannot be cut


def refusal(steps: int, model: Any = None, total: Any = None, **settings: Any) -> str:
    loss = {"loss": evener.loss(total=total, count=len)} if total else {}
    asked = task(model, **loss) if model else task(**loss)
    try:
        with Engine(asked, device="cpu", micro_batch="auto", steps=steps, **settings) as engine:
            for batch in engine.batches():
                engine.step(batch)
    except ConfigurationError as error:
        return str(error)
    return "nothing was said"


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), evener.nn.Experts(8, 8, 2), nn.Linear(8, 3))


def meeting(outputs: Tensor, targets: Tensor) -> Tensor:
    data_group()
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"strategy": "pipeline"},
            "pass a micro-batch through one device of each rank.* not with 'pipeline'",
        ),
        ({"strategy": "sharded", "model": normalized}, "1 normalizes those that are computed together"),
        ({"strategy": "sharded", "model": mixed}, "1 has a balance, and room, for those"),
        ({"strategy": "ddp", "model": mixed}, "1 has a balance, and room, for those"),
        ({"strategy": "sharded", "total": meeting}, "of the samples of all ranks together"),
        ({"strategy": "ddp", "total": meeting}, "of the samples of all ranks together"),
    ],
)
def test_what_pieces_would_change_is_refused(ranks: Any, asked: dict[str, Any], words: str) -> None:
    for said in ranks(2).run(refusal, 1, **asked):
        assert re.search(words, said), said


def test_several_devices_of_one_process_are_refused() -> None:
    assert "not with 'layers'" in refusal(1, strategy="layers", devices="cpu:0,cpu:1")
