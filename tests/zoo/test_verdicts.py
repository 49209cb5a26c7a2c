"""The verdict on models as the public ones are: right where the training is right, wrong for each deliberate error."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from typing import Any

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.tools.verify import Trajectory, Verification, record
from evener.tools.verify.comparison import LIMIT, ComparedRuns, compare, type_of
from evener.tools.verify.trajectory import Batches
from evener.tools.verify.verification import STRONGER, OneDevice, alone, judge
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed, spread
from tests.zoo import faults

TASKS = {
    "bert": "tests.zoo.text:bert",
    "gpt": "tests.zoo.text:gpt",
    "mobilenet": "tests.zoo.vision:mobilenet",
    "efficientnet": "tests.zoo.vision:efficientnet",
    "vit": "tests.zoo.vision:vit",
}
NORMS = {"mobilenet": 5, "efficientnet": 7}
"""Which BatchNorm is spoilt."""
SETTINGS = {"steps": 4, "balance": "3,1"}
CLEARLY = STRONGER * LIMIT
"""Times the floor."""
SINGLE = pytest.param("float32", marks=NIGHTLY)
exactly = pytest.mark.parametrize("dtype", ["float64", SINGLE])


def of_models(*always: str) -> list[Any]:
    """All models, of which some are of every run."""
    return [pytest.param(name, marks=ALWAYS if name in always else NIGHTLY) for name in TASKS]


@cache
def on_one(name: str, config: RunConfig, penalty: float) -> OneDevice:
    run = partial(record, TASKS[name], {"penalty": penalty}, alone(config), Environment())
    return OneDevice(run, torch.finfo(type_of(config)).eps)


def verdict(
    ranks: Any, name: str, fault: Batches | None = None, penalty: float = 0.0, world: int = 2, **settings: Any
) -> Verification:
    """As ``verify``, on ranks that are up already; with a fault in the divided run."""
    config = RunConfig(**(SETTINGS | settings))
    given = {} if fault is None else {"batches": fault}
    divided = ranks(world).run(record, TASKS[name], {"penalty": penalty}, config, **given)
    one = on_one(name, config, penalty)
    if fault is None:
        return judge(one, partial(comparison, one, divided, config))
    return comparison(one, divided, config)


def comparison(one: OneDevice, divided: list[Trajectory], config: RunConfig) -> Verification:
    return compare(ComparedRuns(one.reference, divided, one.disturbed, one.reordered), config, "name")


def clear(ranks: Any, name: str, fault: Batches, **settings: Any) -> Verification:
    """The verdict on a run with a fault, which shows by more than the strongest disturbance makes of rounding."""
    found = verdict(ranks, name, fault, **settings)
    assert not found.passed
    assert found.times_floor > CLEARLY
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *crossed(TASKS, ["float64", "float32"], lambda _: (NIGHTLY, ALWAYS)),
        *(pytest.param(name, "bfloat16", id=f"{name}-bfloat16", marks=SLOW) for name in TASKS),
    ],
)
def test_right_training_is_the_same_to_rounding(ranks: Any, name: str, dtype: str) -> None:
    found = verdict(ranks, name, dtype=dtype)
    assert found.passed, found.hint
    assert found.times_floor <= LIMIT / 2
    assert found.reordered


@pytest.mark.parametrize("name", of_models("bert", "mobilenet", "efficientnet"))
def test_parameters_whose_gradient_is_zero_are_recognised(ranks: Any, name: str) -> None:
    """Key biases, and biases before a BatchNorm; a projection for all three holds real gradients, too."""
    found = verdict(ranks, name, dtype="float64")
    expected = {
        "bert": {f"layers.{n}.attention.key.bias" for n in (0, 1)},
        "mobilenet": {"features.1.conv.1.bias", "features.2.conv.2.bias", "features.4.conv.2.bias"},
        "efficientnet": {"stem.0.bias"},
    }
    assert expected.get(name, set()) <= set(found.judged_absolutely)
    assert not [name for name in found.judged_absolutely if not name.endswith("bias")]
    assert found.max_relative_weight_error <= 1e-9


WRONG: dict[str, tuple[Batches, float, str]] = {
    "averaged": (faults.averaged, 1e5, "averaged over 2 ranks instead of summed?"),
    "counted twice": (
        faults.counted_twice,
        CLEARLY,
        "the loss of step 1 agrees, but not its gradients.*counted 2 times?",
    ),
    "trained twice": (faults.trained_twice, CLEARLY, "at the samples of step 1"),
}


@exactly
@pytest.mark.parametrize(
    ("wrong", "name"), crossed(WRONG, list(TASKS), lambda _: (ALWAYS, NIGHTLY, NIGHTLY, NIGHTLY, NIGHTLY))
)
def test_a_batch_that_goes_wrong_is_found(ranks: Any, name: str, dtype: str, wrong: str) -> None:
    fault, least, words = WRONG[wrong]
    found = clear(ranks, name, fault, dtype=dtype)
    assert found.times_floor > least
    assert re.search(words.replace("?", r"\?"), found.hint), found.hint


@pytest.mark.parametrize("name", spread(TASKS, ALWAYS, NIGHTLY, SLOW, SLOW, NIGHTLY))
@exactly
def test_a_penalty_once_a_rank_is_found(ranks: Any, name: str, dtype: str) -> None:
    assert verdict(ranks, name, dtype=dtype, penalty=1e-4).passed
    found = clear(ranks, name, faults.penalty_per_rank, dtype=dtype, penalty=1e-4)
    assert "times the gradient of the task's penalty" in found.hint


@pytest.mark.parametrize("name", spread(NORMS, NIGHTLY, ALWAYS))
@exactly
def test_one_wrong_batch_norm_is_found(ranks: Any, name: str, dtype: str) -> None:
    """By its running statistics, and without these by losses and gradients."""
    found = clear(ranks, name, faults.LocalStatistics(NORMS[name]), dtype=dtype)
    assert min(found.times_floor_by_kind[kind] for kind in ("loss", "statistic", "gradient")) > CLEARLY
    assert "takes statistics over its rank's samples alone" in found.hint


@pytest.mark.parametrize("name", of_models("gpt", "mobilenet"))
def test_an_error_of_a_millionth_in_any_one_gradient_shows_in_float64(ranks: Any, name: str) -> None:
    """A sketch is linear: that of a gradient which is off by a factor is off by that factor."""
    config = RunConfig(dtype="float64", **SETTINGS)  # type: ignore[arg-type]
    divided = ranks(2).run(record, TASKS[name], {"penalty": 0.0}, config)
    one = on_one(name, config, 0.0)
    right = comparison(one, divided, config)
    with_gradient = {parameter for sketches in one.reference.gradients for parameter in sketches}
    real = with_gradient - set(right.judged_absolutely)
    assert len(real) >= 25
    for parameter in real:
        found = comparison(one, [off(divided[0], parameter, 1 + 1e-6), divided[1]], config)
        assert found.times_floor > CLEARLY, f"{parameter}: over the higher floor, too"
        assert parameter in found.worst
        assert "those of" in found.hint, found.hint


def off(trajectory: Trajectory, parameter: str, factor: float) -> Trajectory:
    gradients = [
        {name: value * (factor if name == parameter else 1.0) for name, value in sketches.items()}
        for sketches in trajectory.gradients
    ]
    return dataclasses.replace(trajectory, gradients=gradients)


@pytest.mark.parametrize(
    ("name", "parameter"),
    spread(
        [
            ("bert", "layers.1.norm2.bias"),
            ("gpt", "blocks.0.mlp.2.weight"),
            ("mobilenet", "features.0.0.weight"),
            ("efficientnet", "blocks.1.block.2.fc1.bias"),
            ("vit", "cls_token"),
        ],
        *(NIGHTLY, NIGHTLY, ALWAYS, NIGHTLY, ALWAYS),
    ),
)
def test_training_with_an_error_of_a_millionth_in_one_gradient_is_found(
    ranks: Any, name: str, parameter: str
) -> None:
    found = clear(ranks, name, faults.Scaled(parameter), dtype="float64")
    assert f"those of {parameter} are 1.000001 times those of one device" in found.hint


DTYPES = ("float64", "float32", "bfloat16")
REGIMES: dict[str, dict[str, Any]] = {
    "long": {"steps": 60},
    "idle rank, clipped": {"steps": 60, "world": 3, "balance": "1,0,3", "clip_norm": 0.1},
    "accumulated": {"steps": 20, "world": 3, "balance": "0.5,0.3,0.2", "micro_batch": 4, "seed": 3},
}
SQUARE = [
    (name, regime, DTYPES[(row + column) % 3])
    for row, name in enumerate(TASKS)
    for column, regime in enumerate(REGIMES)
]
"""Each model meets every regime and every type, and each regime every type."""


@pytest.mark.parametrize(("name", "regime", "dtype"), spread(SQUARE, SLOW, NIGHTLY, NIGHTLY, NIGHTLY))
def test_the_verdict_holds_where_small_differences_grow(
    ranks: Any, name: str, regime: str, dtype: str
) -> None:
    found = verdict(ranks, name, dtype=dtype, **REGIMES[regime])
    assert found.passed, (found.times_floor, found.hint)


@pytest.mark.parametrize("name", spread(TASKS, NIGHTLY, SLOW))
def test_averaged_gradients_are_found_in_bfloat16_and_in_long_runs(ranks: Any, name: str) -> None:
    assert not verdict(ranks, name, faults.averaged, dtype="bfloat16").passed
    clear(ranks, name, faults.averaged, dtype="float32", steps=60)
