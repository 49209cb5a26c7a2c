"""What a run took, beside what was predicted, term by term."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from evener.core.records import RECORDS
from evener.errors import ConfigurationError, DataError
from evener.files import read_json, read_text
from evener.tools.plan.calibration import Calibration
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepTime, step_time
from evener.tools.plan.text import seconds_text
from evener.tools.plan.trials import WARM_STEPS

LEAST_STEPS = 3
"""A run needs so many steps after the first ones."""


@dataclass(frozen=True)
class ComparedStep:
    """A predicted step and the median one of a run."""

    candidate: Candidate
    predicted: StepTime
    seconds: float
    """The measured step."""
    terms: dict[str, float]
    """The measured terms, under the names of :attr:`StepTime.terms`."""
    batch_size: int = 0

    @property
    def difference(self) -> float:
        """The relative error of the prediction."""
        return self.predicted.seconds / self.seconds - 1

    @property
    def is_within(self) -> bool:
        """True if the run lies in the interval that holds nine of ten."""
        return self.predicted.quantile(0.05) <= self.seconds <= self.predicted.quantile(0.95)

    @property
    def farthest(self) -> str:
        """The term that differs the most."""
        terms = self.predicted.terms
        return max(self.terms, key=lambda name: abs(terms[name] - self.terms[name]))

    def words(self) -> str:
        """Returns one line."""
        low, high = (seconds_text(self.predicted.quantile(part)) for part in (0.05, 0.95))
        verdict = "as predicted" if self.is_within else f"{self.farthest} is off the most"
        return (
            f"a step took {seconds_text(self.seconds)}, and {seconds_text(self.predicted.seconds)} were predicted "
            f"({low} to {high}): {verdict}"
        )

    def table(self) -> str:
        """Returns the terms of both as lines."""
        lines = [f"{'':<14}{'predicted':>12}{'measured':>12}"]
        for name, took in (*self.terms.items(), ("step", self.seconds)):
            expected = self.predicted.seconds if name == "step" else self.predicted.terms[name]
            lines.append(f"{name:<14}{seconds_text(expected):>12}{seconds_text(took):>12}")
        return "\n".join([*lines, self.words()])


def compared_step(calibration: Calibration, run: Path) -> ComparedStep:
    """Compares the steps of a run with what a calibration predicts for its settings and shares.

    Raises:
        ConfigurationError: If the calibration does not have the way in which the run has trained.
        DataError: If the run has too few steps, or its files cannot be read.
    """
    try:
        config, summary = (read_json(run / name) for name in ("config.json", "summary.json"))
        steps = _since_start(list(_steps(run / RECORDS)), summary)[WARM_STEPS + 1 :]
        task, ranks, batch_size = summary["task"], summary["world_size"], summary["batch_size"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{run} is not the directory of a run that has ended: {error!r}") from error
    steps = [step for step in steps if step["samples"] == batch_size]
    if len(steps) < LEAST_STEPS:
        raise DataError(
            f"{run} has {len(steps)} whole steps after the first ones; at least {LEAST_STEPS} are needed"
        )
    if calibration.task != task:
        raise ConfigurationError(
            f"the calibration is of {calibration.task!r}, and {run} has trained {task!r}"
        )
    if config.get("throttle"):
        raise ConfigurationError(
            f"{run} emulated slower devices (--throttle), and the calibration is of these"
        )
    if config.get("profile"):
        raise ConfigurationError(f"{run} was profiled (--profile), and steps that are take longer")
    candidate = _candidate(config, ranks)
    named = replace(candidate, allreduce=config.get("allreduce"))
    candidate = named if named in calibration.costs else candidate
    costs = calibration.costs.get(candidate)
    if costs is None:
        raise ConfigurationError(
            f"the calibration does not have --strategy {candidate.words}, as {run} has trained"
        )
    predicted = step_time(costs, batch_size, weights=[max(each, 1e-9) for each in steps[-1]["shares"]])
    compute = [_medians(steps, "compute_seconds"), _medians(steps, "input_seconds")]
    mean, slowest = sum(compute[0]) / len(compute[0]), max(compute[0])
    waits = max(compute[1])
    # As a trial's steps, which begin with reading: rank 0 waits for its samples before its record's step.
    seconds = median(step["seconds"] + step["input_seconds"][0] for step in steps)
    return ComparedStep(
        candidate,
        predicted,
        seconds,
        {
            "compute": mean,
            "waiting": slowest - mean,
            "communication": max(0.0, seconds - slowest - waits),
            "input": waits,
        },
        batch_size,
    )


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for line in read_text(path, sys.maxsize).splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            yield record


def _since_start(steps: list[dict[str, Any]], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps since the start or the resume. Those before a resume may be of other ranks or another way."""
    left, place = summary.get("samples_in_seconds") or math.inf, len(steps)
    while place and left > 0:
        place -= 1
        left -= steps[place]["samples"]
    return steps[place:]


def _medians(steps: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [median(column) for column in zip(*(step[name] for step in steps), strict=True)]


def _candidate(config: dict[str, Any], ranks: int) -> Candidate:
    """Returns the way in which a run with these settings has trained."""
    strategy = config["strategy"]
    if strategy == "auto":
        strategy = "ddp" if ranks > 1 else "single"
    options = tuple(config["strategy_option"])
    if strategy == "sharded" and not any(each.startswith("zero=") for each in options):
        options = ("zero=3", *options)
    micro_batch = config["micro_batch"] if isinstance(config["micro_batch"], int) else None
    return Candidate(ranks, strategy, options, config["mesh"], micro_batch, config["recompute"])
