"""Draws the effect of load balancing from a run's records: shares, compute time of each rank, and steps per second.

The records of a million steps may have a gigabyte. So the file is read line by line, and each drawn point keeps only
the median of its steps.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evener.checkpoint.remote.fetch import fetched
from evener.core.os_errors import storage_errors
from evener.core.records import RECORDS
from evener.errors import ConfigurationError, DataError
from evener.files import LONGEST_LINE, lines_of, open_regular, parsed
from evener.training.reporting.drawing import Panel, Point, svg

_POINTS = 120
"""The approximate number of points of a line. Each is the median of several steps."""
_GREATEST = 1e15
"""Numbers of this size or larger are no measurements and are not drawn."""


class Curve:
    """A line over steps. Each point is the median of the values of several steps."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._steps: list[float] = []
        self._values: list[float] = []

    def add(self, step: float, value: float | None) -> None:
        """Adds a value to the current point. Ignores None."""
        if value is not None:
            self._steps.append(step)
            self._values.append(value)

    def close_point(self) -> None:
        """Ends the current point: later values belong to the next one."""
        if self._values:
            middle = self._steps[len(self._steps) // 2]
            self.points.append((middle, statistics.median(self._values)))
            self._steps, self._values = [], []


class RunSteps:
    """The steps of a run, read from its records and reduced to the curves that are drawn.

    Args:
        name: The name of the run.
        together: The number of steps of one point.
    """

    def __init__(self, name: str, together: int = 1) -> None:
        self.name, self._together = name, together
        self.shares: list[Curve] = []
        """The share of each rank in per cent."""
        self.milliseconds: list[Curve] = []
        """The compute time of each rank in milliseconds."""
        self.speed = Curve()
        """The steps per second."""
        self._seconds = array("d")
        self._under_way = 0

    @classmethod
    def from_directory(cls, directory: Path) -> RunSteps:
        """Reads the records of a run directory.

        Raises:
            ConfigurationError: If ``directory`` is no run directory, or has no record of a step.
            DataError: If a record cannot be read.
        """
        path = fetched(directory, records=True) / RECORDS
        if not path.is_file():
            raise ConfigurationError(f"{directory} is no run directory: it has no {RECORDS}")
        with storage_errors(f"the records of {directory} cannot be read"):
            found = cls(directory.resolve().name, max(1, _lines_in(path) // _POINTS))
            for record in _records(path):
                found.add(*record)
        found._close()
        if not found._seconds:
            raise ConfigurationError(f"{directory} has no record of a step: there is nothing to draw")
        return found

    def add(self, step: float, seconds: float, shares: list[float], times: list[float | None]) -> None:
        """Adds a step with the samples, or their cost, and the compute seconds of each rank. ``seconds`` is NaN if not
        known."""
        self._seconds.append(seconds)
        self.speed.add(step, 1 / seconds if seconds > 0 else None)
        total = sum(shares) if sum(shares) > 0 else 1.0
        _add(self.shares, step, [100 * share / total for share in shares])
        _add(self.milliseconds, step, [None if time is None else 1000 * time for time in times])
        self._under_way += 1
        if self._under_way == self._together:
            self._close()

    def _close(self) -> None:
        self._under_way = 0
        for line in (*self.shares, *self.milliseconds, self.speed):
            line.close_point()

    @property
    def steps_per_second(self) -> float:
        """The median speed in the second half, when shares have settled; NaN if no duration is known."""
        late = [seconds for seconds in self._seconds[len(self._seconds) // 2 :] if not math.isnan(seconds)]
        return 1 / max(statistics.median(late), 1e-9) if late else math.nan


def _add(lines: list[Curve], step: float, values: Sequence[float | None]) -> None:
    lines += [Curve() for _ in range(len(values) - len(lines))]
    for line, value in zip(lines, values, strict=False):
        line.add(step, value)


def _lines_in(path: Path) -> int:
    with open_regular(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _records(path: Path) -> Iterator[tuple[float, float, list[float], list[float | None]]]:
    """Yields number, seconds, shares and compute times of each step. Ignores an incomplete last line of a killed
    run."""
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file), 1):
            try:
                record = parsed(line.decode())
                if _is_step(record):
                    yield _numbers(record)
            except (ValueError, TypeError, KeyError) as error:
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    return
                raise DataError(f"{path}, line {number} is no record: {_reason(error)}") from error


def _is_step(record: Any) -> bool:
    if not isinstance(record, dict):
        raise TypeError(f"it is a {type(record).__name__}")
    return record.get("kind") == "step"


def _numbers(record: dict[str, Any]) -> tuple[float, float, list[float], list[float | None]]:
    step, seconds = _number(record["step"]), _number(record["seconds"])
    if step is None:
        raise ValueError("its step is no number")
    shares = [_number(share) or 0.0 for share in _list(record.get("costs") or record["shares"])]
    times = [_number(time) for time in _list(record["compute_seconds"])]
    return step, math.nan if seconds is None else seconds, shares, times


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} stands for the numbers of the ranks")
    return value


def _number(value: Any) -> float | None:
    """Returns a number as float. Returns None for None, and for a number too large to be a measurement."""
    if value is not None and type(value) not in (int, float):
        raise TypeError(f"a {type(value).__name__} stands for a number")
    return float(value) if value is not None and abs(value) < _GREATEST else None


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def drawn(runs: Sequence[RunSteps]) -> str:
    """Returns an SVG drawing of the first run. Its third panel compares the steps per second of all runs."""
    first = runs[0]
    return svg(
        title(runs),
        [
            Panel("share of each batch", "%", _of_ranks(first.shares)),
            Panel("time of each rank's own work", "ms", _of_ranks(first.milliseconds)),
            Panel("steps per second", "", [(each.name, each.speed.points or [(0.0, 0.0)]) for each in runs]),
        ],
    )


def title(runs: Sequence[RunSteps]) -> str:
    """Returns the title of the drawing: ``auto: 34 steps/s, 1.52x of equal``."""
    first, *others = runs
    ratios = [first.steps_per_second / other.steps_per_second for other in others]
    compared = "".join(f", {ratio:.2f}x of {each.name}" for ratio, each in zip(ratios, others, strict=True))
    return f"{first.name}: {first.steps_per_second:.3g} steps/s{compared}"


def _of_ranks(lines: Sequence[Curve]) -> list[tuple[str, list[Point]]]:
    found = [(f"rank {rank}", line.points) for rank, line in enumerate(lines) if line.points]
    return found or [("not known", [(0.0, 0.0)])]
