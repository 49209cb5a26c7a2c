"""Draws the effect of load balancing from the report of a run: shares, compute time of each rank, and steps per
second."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from evener.errors import ConfigurationError
from evener.tools.report.charts import GREATEST
from evener.tools.report.schema import COMPUTE, SHARE, STEP_SECONDS, Report
from evener.training.reporting.drawing import Panel, Point, svg

_POINTS = 120
"""At most so many points of a line. Each is the median of several columns of the report."""
Line = list[tuple[float, float]]
"""Steps, and a number for each."""


def drawn(runs: Sequence[Report]) -> str:
    """Returns an SVG drawing of the first run. Its third panel compares the steps per second of all runs.

    Raises:
        ConfigurationError: If a run has no step.
    """
    first = runs[0]
    speeds = [[(step, 1 / seconds) for step, seconds in _points(_durations(each))] for each in runs]
    names = [each.identity.name for each in runs]
    return svg(
        title(runs),
        [
            Panel("share of each batch", "%", _of_ranks(first, SHARE, 100)),
            Panel("time of each rank's own work", "ms", _of_ranks(first, COMPUTE, 1000)),
            Panel(
                "steps per second", "", list(zip(names, [each or _NOTHING for each in speeds], strict=True))
            ),
        ],
    )


def title(runs: Sequence[Report]) -> str:
    """Returns the title of the drawing: ``auto: 34 steps/s, 1.52x of equal``."""
    speed, *others = map(steps_per_second, runs)
    compared = "".join(
        f", {speed / other:.2f}x of {each.identity.name}"
        for other, each in zip(others, runs[1:], strict=True)
    )
    return f"{runs[0].identity.name}: {speed:.3g} steps/s{compared}"


def steps_per_second(run: Report) -> float:
    """Returns the median speed in the second half, when shares have settled; NaN if no duration is known."""
    seconds = [each for _, each in _durations(run)]
    return 1 / median(seconds[len(seconds) // 2 :]) if seconds else float("nan")


_NOTHING = [(0.0, 0.0)]


def _durations(run: Report) -> Line:
    if not run.columns.first:
        raise ConfigurationError(f"{run.identity.name} has no record of a step: there is nothing to draw")
    return [point for point in _line(run, STEP_SECONDS, None) if point[1] > 0]


def _line(run: Report, name: str, rank: int | None) -> Line:
    """Returns the means of a quantity in the columns in which it is known, each at the middle of its steps."""
    (means,) = [each.mean for each in run.series if (each.name, each.rank) == (name, rank)] or [()]
    middles = [(first + last) / 2 for first, last in zip(run.columns.first, run.columns.last, strict=True)]
    points = zip(middles, means, strict=False)
    return [(step, mean) for step, mean in points if mean is not None and abs(mean) < GREATEST]


def _points(line: Line) -> list[Point]:
    """Returns at most `_POINTS` points: medians of neighbours."""
    together = -(-len(line) // _POINTS) or 1
    groups = [line[at : at + together] for at in range(0, len(line), together)]
    return [(group[len(group) // 2][0], median(value for _, value in group)) for group in groups]


def _of_ranks(run: Report, name: str, factor: float) -> list[tuple[str, list[Point]]]:
    ranks = [each.rank for each in run.series if each.name == name and each.rank is not None]
    lines = {rank: [(step, factor * value) for step, value in _line(run, name, rank)] for rank in ranks}
    found = [(f"rank {rank}", _points(line)) for rank, line in lines.items() if line]
    return found or [("not known", _NOTHING)]
