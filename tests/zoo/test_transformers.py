"""The verdict on transformers' models in stages, whose code cannot be read: at two and four stages, and in a mesh."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.tools.verify import Trajectory, Verification, record
from evener.tools.verify.comparison import ComparedRuns, compare
from evener.tools.verify.verification import OneDevice, alone, judge
from tests.tiers import NIGHTLY, SLOW, crossed

pytest.importorskip("transformers", reason="needs the extra transformers")
MODELS = ("gpt2", "llama", "gpt2_classifier", "bert", "t5", "vit")
PLACES = {
    "two stages": (2, {}),
    "four stages": (4, {}),
    "data x pipeline": (4, {"mesh": "pipeline=2,data=2", "balance": "2,1"}),
}
START_SECONDS = 400
"""Four ranks that import transformers at once, on two cores."""


@cache
def on_one(name: str, config: RunConfig) -> OneDevice:
    run = partial(record, f"tests.zoo.transformers:{name}", None, alone(config), Environment())
    return OneDevice(run, torch.finfo(torch.float64).eps)


def comparison(one: OneDevice, divided: list[Trajectory], config: RunConfig) -> Verification:
    return compare(ComparedRuns(one.reference, divided, one.disturbed, one.reordered), config, "name")


@pytest.mark.parametrize(
    ("place", "name"), crossed(PLACES, list(MODELS), lambda place: (SLOW, NIGHTLY, NIGHTLY))
)
def test_the_verdict_on_a_model_in_stages(ranks: Any, place: str, name: str) -> None:
    world, settings = PLACES[place]
    config = RunConfig(strategy="pipeline", dtype="float64", device="cpu", steps=4, **settings)  # type: ignore[arg-type]
    task = f"tests.zoo.transformers:{name}"
    divided = ranks(world).run(record, task, None, config, timeout=START_SECONDS)
    one = on_one(name, config)
    found = judge(one, partial(comparison, one, divided, config))
    assert found.passed, found.hint
