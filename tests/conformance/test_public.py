"""Public models whose code cannot be read, cut between their blocks: the training of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from evener.strategies.pipeline.pipeline import Pipeline
from evener.strategies.sharded.sharded import Sharded
from tests.comparing import worst
from tests.conformance import public
from tests.conformance.runs import Outcome, run
from tests.conformance.test_conformance import TOLERANCE, Row
from tests.tiers import ALWAYS, NIGHTLY, SLOW, Tier, crossed

ROWS = {
    "two stages": Row(2, {"strategy": "pipeline"}),
    "four stages": Row(4, {"strategy": "pipeline"}),
    "interleaved": Row(
        2, {"strategy": "pipeline", "strategy_option": ("schedule=interleaved", "stages_per_rank=2")}
    ),
    "zero bubble": Row(2, {"strategy": "pipeline", "strategy_option": ("schedule=zero-bubble",)}),
    "data x pipeline": Row(4, {"strategy": "pipeline", "mesh": "pipeline=2,data=2", "balance": "2,1"}),
    "recomputed": Row(2, {"strategy": "pipeline", "recompute": "blocks"}),
    "pipeline x sharded 2": Row(
        4, {"strategy": (Pipeline(), Sharded(zero=2, shard_sizes="2,1")), "mesh": "pipeline=2,shard=2"}
    ),
}


@functools.cache
def reference(model: str) -> Outcome:
    found = run(model, {"strategy": "single"}, alone=True)
    assert not found.refused
    return found


def tiers(row: str) -> tuple[Tier, ...]:
    return (
        (ALWAYS, SLOW, NIGHTLY, NIGHTLY, SLOW, NIGHTLY) if row == "two stages" else (SLOW, NIGHTLY, NIGHTLY)
    )


@pytest.mark.parametrize(("row", "model"), crossed(ROWS, list(public.MODELS), tiers))
def test_it_is_the_training_of_one_device(ranks: Any, row: str, model: str) -> None:
    for outcome in ranks(ROWS[row].ranks).run(run, model, ROWS[row].how):
        assert not outcome.refused
        assert worst(reference(model).numbers, outcome.numbers) <= TOLERANCE
