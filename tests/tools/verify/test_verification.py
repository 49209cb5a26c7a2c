"""The whole proof, on ranks that are up already."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from functools import partial
from typing import Any

import pytest
import torch

from evener.cli.verify import text
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, ShareError
from evener.tools.verify import Trajectory, Verification, record, verify
from evener.tools.verify.comparison import LIMIT, ComparedRuns, compare
from evener.tools.verify.perturbation import Disturbance
from evener.tools.verify.verification import ALL_RUNS, FIRST_RUNS, STRONGER, OneDevice, judge
from tests import tasks
from tests.tools.verify.runs import compared, disturbed, run, scaled

EPS = torch.finfo(torch.float64).eps


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_verification_on_two_processes() -> None:
    """Batches of 9 out of 47, so that the last one of an epoch has 2 samples; BatchNorm; layouts."""
    result = verify(tasks.batch_norm, processes=2, balance="0.9,0.1", steps=7, device="cpu")
    assert result.passed
    assert result.replicas_identical
    assert result.max_relative_weight_error <= 1e-12
    assert (result.dtype, result.processes, result.shares, result.steps) == ("float64", 2, "0.9,0.1", 7)
    assert (result.batch_size, len(result.losses)) == (9, 7)
    assert result.losses == pytest.approx(result.reference_losses, rel=1e-12)
    assert {"0.weight", "1.running_mean", "1.num_batches_tracked"} <= result.weight_errors.keys()
    assert result.times_floor <= LIMIT / 3
    assert result.reordered
    assert "0.bias" in result.judged_absolutely, "a bias before a BatchNorm"
    assert text(result).startswith(
        f"PASS: the training of one device. The largest difference is {result.times_floor:.3g} times what rounding"
    )
    assert json.loads(json.dumps(dataclasses.asdict(result)))["passed"] is True


def test_what_cannot_be_verified() -> None:
    with pytest.raises(ConfigurationError, match="nothing to verify with 1 process"):
        verify("digits", processes=1, device="cpu")
    with pytest.raises(ConfigurationError, match="from the first weights on, and not from runs/first"):
        verify("digits", processes=2, device="cpu", resume="runs/first")
    with pytest.raises(ShareError):
        verify("digits", processes=2, device="cpu", balance="1,1,1")
    for tolerance in (-1e-9, math.nan):
        with pytest.raises(ConfigurationError, match=f"tolerance is {tolerance}; it must be a number"):
            verify("digits", processes=2, device="cpu", tolerance=tolerance)


def on_one(name: str) -> OneDevice:
    config = RunConfig(dtype="float64", steps=2, strategy="single")
    return OneDevice(partial(record, f"tests.tasks:{name}", None, config, Environment()), EPS)


def test_samples_are_reordered_where_that_is_only_rounding() -> None:
    """A dropout that draws by place gives another loss, which would make a floor over which nothing shows."""
    assert on_one("dropout").reordered
    by_place = on_one("plain_dropout")
    assert not by_place.reordered
    assert len(by_place.disturbed) == FIRST_RUNS


class Kinked:
    """Made-up runs: rounding moves every fifth by much more than the others."""

    def __init__(self) -> None:
        self.taken = 0
        self.last: Disturbance | None = None

    def __call__(self, batches: Any = None) -> Trajectory:
        self.taken += 1
        self.last = batches
        if batches is None:
            return run()
        return disturbed(4000 if batches.seed % 5 == 0 else 4)


def judged(divided: Trajectory, runs: Kinked) -> Verification:
    one, config = OneDevice(runs, EPS), RunConfig(dtype="float64")
    return judge(one, lambda: compare(ComparedRuns(one.reference, [divided], one.disturbed), config, "name"))


def test_the_floor_is_measured_more_thoroughly_before_the_verdict_is_no() -> None:
    runs = Kinked()
    assert judged(disturbed(8), runs).passed
    assert runs.taken == 1 + FIRST_RUNS
    assert judged(disturbed(5000), runs := Kinked()).passed
    assert (runs.taken, runs.last) == (1 + ALL_RUNS, Disturbance(ALL_RUNS, strength=STRONGER, eps=EPS))
    assert not judged(scaled(1 + 1e-9), runs := Kinked()).passed
    assert runs.taken == 1 + ALL_RUNS


def test_what_the_command_says() -> None:
    passed = text(compared(disturbed(12)))
    assert "error 2.66e-15 in fc.weight (by rounding alone 8.88e-16)" in passed
    assert "no gradient but rounding, so judged absolutely: key" in passed
    many = dataclasses.replace(compared(disturbed(12)), judged_absolutely=list("abcde"))
    assert "judged absolutely: a, b, c and 2 more" in text(many)
    assert "is 3 times what rounding alone makes (20 allowed), in " in passed
    failed = text(compared(scaled(0.5), run()))
    verdict = failed.splitlines()[0]
    assert re.match(
        r"FAIL: not the training of one device\. The gradient of \S+.* is off by 5.63e\+14 times what",
        verdict,
    )
    assert verdict.endswith("averaged over 2 ranks instead of summed?")
    tolerated = text(compared(disturbed(12), tolerance=1e-3))
    assert "(allowed 1e-03)" in tolerated
    assert "(allowed by --tolerance), in " in tolerated
