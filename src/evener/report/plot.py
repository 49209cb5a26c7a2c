"""What balancing did in a run, drawn from its records: shares, the ranks' own times, and steps per second."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import ConfigurationError, DataError
from evener.records import RECORDS
from evener.report.drawing import Panel, Point, svg
from evener.system import in_words

_POINTS = 120
"""Of a line: each is the median of so many steps as fall to it."""


@dataclass(frozen=True)
class RunSteps:
    """The steps of a run, as its records tell them."""

    name: str
    records: list[dict[str, Any]]

    @classmethod
    def of(cls, directory: Path) -> RunSteps:
        """
        Raises:
            ConfigurationError: If the directory is none of a run, or no step was taken.
            DataError: If a record cannot be read.
        """
        path = directory / RECORDS
        if not path.is_file():
            raise ConfigurationError(f"{directory} is no run directory: it has no {RECORDS}")
        with in_words(f"the records of {directory} cannot be read"):
            found = list(_records(path))
        if not found:
            raise ConfigurationError(f"{directory} has no record of a step: there is nothing to draw")
        return cls(directory.name, found)

    @property
    def steps_per_second(self) -> float:
        """By the median of the second half, when shares have settled."""
        late = self.records[len(self.records) // 2 :]
        return 1 / max(float(statistics.median(record["seconds"] for record in late)), 1e-9)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # of a run that was killed while it wrote
                return
            raise DataError(f"{path}, line {number} is no record: {error}") from error
        if record.get("kind") == "step":
            yield record


def drawn(runs: Sequence[RunSteps]) -> str:
    """The drawing of the first run, with the steps per second of the others beside its own."""
    first, *others = runs
    ratios = [first.steps_per_second / other.steps_per_second for other in others]
    compared = ", ".join(f"{ratio:.2f}x of {each.name}" for ratio, each in zip(ratios, others, strict=True))
    return svg(
        f"{first.name}: {first.steps_per_second:.3g} steps/s" + (f", {compared}" if others else ""),
        [
            Panel("share of each batch", "%", _of_ranks(first, _share)),
            Panel("time of each rank's own work", "ms", _of_ranks(first, _own_milliseconds)),
            Panel("steps per second", "", [(each.name, _line(each, _speed)) for each in runs]),
        ],
    )


def _share(record: dict[str, Any], rank: int) -> float | None:
    shares = record["shares"]
    return 100 * shares[rank] / max(sum(shares), 1) if rank < len(shares) else None


def _own_milliseconds(record: dict[str, Any], rank: int) -> float | None:
    times = record["compute_seconds"]
    return 1000 * times[rank] if rank < len(times) and times[rank] is not None else None


def _speed(record: dict[str, Any], _: int) -> float | None:
    return 1 / record["seconds"] if record["seconds"] else None


def _of_ranks(run: RunSteps, value: Any) -> list[tuple[str, list[Point]]]:
    ranks = max(len(record["shares"]) for record in run.records)
    lines = [(f"rank {rank}", _line(run, value, rank)) for rank in range(ranks)]
    return [(name, line) for name, line in lines if line] or [("not known", [(0.0, 0.0)])]


def _line(run: RunSteps, value: Any, rank: int = 0) -> list[Point]:
    known = [(record["step"], value(record, rank)) for record in run.records]
    points = [(step, number) for step, number in known if number is not None and math.isfinite(number)]
    together = max(1, len(points) // _POINTS)
    groups = [points[start : start + together] for start in range(0, len(points), together)]
    return [(group[len(group) // 2][0], statistics.median(y for _, y in group)) for group in groups]
