"""Compares two runs: what changed between them, and how much faster or slower the second one is, with intervals.

The intervals take into account that steps are correlated in time: see `evener.tools.report.mean_error`. The same two
reports give the same interval.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evener.errors import ConfigurationError, DataError
from evener.tools.report.columns import Numbers
from evener.tools.report.mean_error import mean_of, reach_of
from evener.tools.report.schema import LOSS, Report
from evener.tools.report.step_series import rounded

_LEAST_BLOCKS = 8
_LATE = 0.25
"""Losses are compared over this last part of the steps that both runs have."""
_POINTS = 64
_GREATEST = 1e15
"""Numbers of this size or larger are no measurements."""
_HERE = ("run_dir", "resume", "overwrite", "weights", "profile", "world_size", "command")
"""Settings that say where a run is."""


@dataclass(frozen=True)
class Changed:
    """Something that differs between the runs."""

    name: str
    """Such as ``setting bucket_mb`` or ``version torch``."""
    old: str
    new: str


@dataclass(frozen=True)
class Measure:
    """A number of both runs."""

    name: str
    old: float
    new: float
    change: float
    """``new / old - 1``, or for losses and metrics ``new - old``."""
    low: float | None = None
    """The change lies between ``low`` and ``high`` with 95 % confidence. None where there is one number alone."""
    high: float | None = None

    @property
    def is_clear(self) -> bool:
        """True if the interval has no change only on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Comparison:
    """What `compare` has found."""

    old: str
    """Name of the first run."""
    new: str
    changed: tuple[Changed, ...]
    step_seconds: Measure
    """Mean seconds of a step, with waiting for samples; ``change`` is positive if the new run is slower."""
    samples_per_second: Measure
    losses: tuple[Measure, ...]
    """Training loss over the last steps that both have, and metrics of the last evaluation after equally many steps."""
    parts: tuple[Measure, ...]
    """Parts of the training time, from 0 to 1; ``change`` is their difference."""

    def slower(self, threshold: float) -> bool:
        """Returns True if a step takes more than ``threshold`` longer, such as 0.05, and the interval is above zero."""
        return self.step_seconds.change > threshold and (self.step_seconds.low or 0.0) > 0

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as values that JSON can hold."""
        return dataclasses.asdict(self)

    def words(self) -> str:
        """Returns the comparison as lines."""
        step = self.step_seconds
        verdict = "slower" if step.change > 0 else "faster"
        verdict = verdict if step.is_clear else f"{verdict}, which may be chance"
        verdict = verdict if step.change else "as fast"
        lines = [
            f"{self.new} beside {self.old}: a step takes {_ms(step.new)} instead of {_ms(step.old)}, "
            f"{step.change:+.1%} ({step.low or 0:+.1%} to {step.high or 0:+.1%}): {verdict}",
            f"  samples/s  {self.samples_per_second.old:,.4g} -> {self.samples_per_second.new:,.4g}",
        ]
        for each in self.losses:
            inside = "" if each.low is None else f" ({each.low:+.3g} to {each.high:+.3g})"
            lines.append(f"  {each.name}  {each.old:.5g} -> {each.new:.5g}, {each.change:+.3g}{inside}")
        lines += [f"  {each.name}  {each.old:.1%} -> {each.new:.1%}" for each in self.parts]
        lines += [f"  {each.name}: {each.old} -> {each.new}" for each in self.changed]
        return "\n".join(lines if self.changed else [*lines, "  settings, versions and devices are the same"])


def compare(old: Report, new: Report) -> Comparison:
    """Compares two runs.

    Raises:
        ConfigurationError: If they cannot be compared, as they do not train the same.
        DataError: If one has too few steps.
    """
    _check_comparable(old, new)
    before, after = (mean_of(_blocks(each)) for each in (old, new))
    reach = reach_of(*(((each.variance**0.5 / each.mean) ** 2, each.freedom) for each in (before, after)))
    ratio = after.mean / before.mean
    inside = rounded(ratio * math.exp(-reach) - 1), rounded(ratio * math.exp(reach) - 1)
    step = Measure("step seconds", before.mean, after.mean, rounded(ratio - 1), *inside)
    rates = old.samples_per_second, new.samples_per_second
    speed = Measure("samples/s", *rates, rounded(rates[1] / rates[0] - 1) if rates[0] else 0.0)
    return Comparison(
        old.identity.name,
        new.identity.name,
        tuple(_changed(old, new)),
        step,
        speed,
        (*_train_loss(old, new), *_metrics(old, new)),
        tuple(_parts(old, new)),
    )


def _check_comparable(old: Report, new: Report) -> None:
    for what, name in (("task", "task"), ("batch size", "batch_size")):
        one, other = (getattr(each.identity, name) for each in (old, new))
        if one != other:
            raise ConfigurationError(
                f"{old.identity.name} and {new.identity.name} cannot be compared: the {what} is {one} and {other}. "
                "Compare runs that train the same"
            )


def _blocks(report: Report) -> Numbers:
    found = np.array([seconds for seconds in report.block_seconds if 0 < seconds < _GREATEST])
    if len(found) < _LEAST_BLOCKS:
        raise DataError(
            f"{report.identity.name} has {len(found)} steps after the first ones that can be compared; at least "
            f"{_LEAST_BLOCKS} are needed"
        )
    return found


# What changed


def _changed(old: Report, new: Report) -> Iterator[Changed]:
    one, other = old.identity, new.identity
    settings = {name: value for name, value in one.settings.items() if name not in _HERE}
    others = {name: value for name, value in other.settings.items() if name not in _HERE}
    yield from _differences("setting", settings, others)
    yield from _differences("version", one.versions, other.versions)
    for name in ("strategy", "world_size", "allreduce"):
        yield from _differences("", {name: getattr(one, name)}, {name: getattr(other, name)})
    yield from _differences("", {"devices": ", ".join(one.devices)}, {"devices": ", ".join(other.devices)})
    shares = [" + ".join(f"{rank.share:.0%}" for rank in each.ranks[:8]) for each in (old, new)]
    yield from _differences("", {"shares": shares[0]}, {"shares": shares[1]})


def _differences(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Changed]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield Changed(f"{what} {name}".strip(), str(old.get(name)), str(new.get(name)))


# Losses and parts


def _train_loss(old: Report, new: Report) -> Iterator[Measure]:
    """Yields the mean training loss over the last steps that both have. Both are read at the same steps."""
    curves = [_curve(each) for each in (old, new)]
    if not all(len(steps) > 1 for steps, _ in curves):
        return
    first = max(steps[0] for steps, _ in curves)
    last = min(steps[-1] for steps, _ in curves)
    if last <= first:
        return
    at = np.linspace(last - _LATE * (last - first), last, _POINTS)
    before, after = (np.interp(at, *curve) for curve in curves)
    apart = mean_of(after - before)
    reach = reach_of((apart.variance, apart.freedom))
    ends = rounded(float(before.mean())), rounded(float(after.mean()))
    inside = rounded(apart.mean - reach), rounded(apart.mean + reach)
    yield Measure("train loss", *ends, rounded(ends[1] - ends[0]), *inside)


def _curve(report: Report) -> tuple[Numbers, Numbers]:
    losses = [series.mean for series in report.series if series.name == LOSS and series.rank is None]
    middles = [
        (first + last) / 2 for first, last in zip(report.columns.first, report.columns.last, strict=True)
    ]
    known = [
        (step, loss)
        for step, loss in zip(middles, losses[0] if losses else (), strict=False)
        if loss is not None and abs(loss) < _GREATEST
    ]
    steps, values = zip(*known, strict=True) if known else ((), ())
    return np.array(steps), np.array(values)


def _metrics(old: Report, new: Report) -> Iterator[Measure]:
    """Yields the metrics of the last evaluation after as many steps in both runs."""
    found = [{each.step: each.metrics for each in report.evaluations} for report in (old, new)]
    both = found[0].keys() & found[1].keys()
    before, after = (each[max(both)] for each in found) if both else ({}, {})
    for name in sorted(before.keys() & after.keys()):
        one, other = before[name], after[name]
        if one is not None and other is not None:
            yield Measure(f"evaluation {name}", one, other, rounded(other - one))


def _parts(old: Report, new: Report) -> Iterator[Measure]:
    names: Sequence[str] = (
        "compute",
        "communication",
        "waiting",
        "input",
        "checkpoints",
        "evaluation",
        "lost_steps",
    )
    wholes = [report.goodput.total - (report.goodput.startup or 0.0) for report in (old, new)]
    for name in names if all(wholes) else ():
        one, other = (
            (getattr(report.goodput, name) or 0.0) / whole
            for report, whole in zip((old, new), wholes, strict=True)
        )
        if max(one, other) >= 0.005:
            yield Measure(name.replace("_", " "), rounded(one), rounded(other), rounded(other - one))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
