"""The result of a plan: the ways to train, fastest first, with the reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from evener.core.config.sizes import size_words
from evener.core.html import html_table
from evener.tools.plan.at_scale import CostAtScale
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import QUANTILES, StepCosts, StepTime

WORTH = 0.05
"""A further device is worth it if it adds at least this part of the speed."""
WORTH_NAMING = 0.05
"""Another all-reduce than the default is chosen if it saves at least this part of a step: what is predicted of two is
about that uncertain."""
HEADROOM = 0.01
"""This part of a memory limit stays free. The estimate leaves out the numbers of the samples, 16 bytes for each."""


@dataclass(frozen=True)
class Way:
    """One way to train, with its prediction."""

    candidate: Candidate
    time: StepTime
    costs: StepCosts
    needed: int | None = None
    """Bytes that the rank with the most needs. None if it was not estimated."""
    limit: int | None = None
    """Bytes that it has. None if there is no limit."""
    algorithm: str = ""
    """What makes it another training than that of one device; else empty."""
    all_reduces: Mapping[str, float] = field(default_factory=dict)
    """For each all-reduce that was compared, the seconds of communication in a step. "default" is one of them."""

    @property
    def lacking(self) -> int:
        """Bytes that the rank with the most lacks; 0 if it fits, or if that is not known."""
        if self.needed is None or self.limit is None:
            return 0
        return max(0, self.needed - int((1 - HEADROOM) * self.limit))

    @property
    def fits(self) -> bool:
        """True unless a rank would need more memory than it has."""
        return not self.lacking

    def as_json(self) -> dict[str, Any]:
        """Returns the way as JSON-serializable values."""
        return {
            "ranks": self.candidate.ranks,
            "options": self.candidate.words,
            "seconds": {f"p{round(100 * part)}": self.time.quantile(part) for part in QUANTILES},
            "terms": self.time.terms,
            "setup_seconds": self.costs.setup,
            "shares": list(self.time.shares),
            "needed": self.needed,
            "limit": self.limit,
            "fits": self.fits,
            "measured": self.costs.is_measured,
            "algorithm": self.algorithm,
            "all_reduces": dict(self.all_reduces),
        }


def best_all_reduce(ways: Sequence[Way]) -> Way:
    """Returns the fastest of ways that differ in their all-reduce alone: the first, unless another is worth naming."""
    first, best = ways[0], min(ways, key=lambda way: way.time.seconds)
    if best.time.seconds > (1 - WORTH_NAMING) * first.time.seconds:
        best = first
    if len(ways) == 1:
        return best
    named = {way.candidate.allreduce or "default": way.time.communication for way in ways}
    return replace(best, all_reduces=named)


@dataclass(frozen=True)
class CurvePoint:
    """The best that a number of devices gives."""

    ranks: int
    way: Way
    speedup: float
    """Over one device, or over the smallest number that fits."""
    added: float
    """What the devices since the last point have added, as a part of the speed there, for each of them."""


@dataclass(frozen=True)
class TrainingPlan:
    """What a plan has found."""

    task: str
    """Name of the task."""
    batch_size: int
    """Samples of a batch, over all ranks."""
    samples: int | None
    """Samples in an epoch. None for a stream."""
    epochs: int | None
    """The most epochs of the run. None if only steps say how long it is."""
    ways: tuple[Way, ...]
    """Fastest first. Those that do not fit come last."""
    refused: dict[str, str] = field(default_factory=dict)
    """What cannot train the task, or was not tried, with the reason."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What was not considered, with the reason."""
    repeat_spread: float = 0.0
    """The relative difference of two trials that were the same; 0 if none was repeated."""
    price_per_hour: float | None = None
    """Of the machines that the best way uses."""
    devices: tuple[str, ...] = ()
    """The devices, in the order of ranks."""
    seconds: float = 0.0
    """What it took to make the plan."""
    notes: tuple[str, ...] = ()
    """Limits of the plan, in words."""
    steps: int | None = None
    """The most steps of the run. None if only epochs say how long it is."""
    at_scale: CostAtScale | None = None
    """What whole steps of the best way cost, if it has many ranks: stragglers, failures, checkpoints."""

    @property
    def best(self) -> Way | None:
        """The fastest way that fits and is the training of one device. None if there is none."""
        return next((way for way in self.ways if way.fits and not way.algorithm), None)

    def curve(self) -> list[CurvePoint]:
        """Returns the fastest fitting way for each number of devices."""
        best: dict[int, Way] = {}
        for way in self.ways:
            if way.fits and not way.algorithm:
                best.setdefault(way.candidate.ranks, way)
        points: list[CurvePoint] = []
        for ranks in sorted(best):
            way = best[ranks]
            first = points[0].way.time.seconds if points else way.time.seconds
            speedup = first / way.time.seconds
            added = (speedup / points[-1].speedup - 1) / (ranks - points[-1].ranks) if points else 0.0
            points.append(CurvePoint(ranks, way, speedup, added))
        return points

    def enough(self) -> CurvePoint | None:
        """Returns the last point of the curve up to which each further device is worth it."""
        points = self.curve()
        if not points:
            return None
        reached = points[0]
        for point in points[1:]:
            if point.added >= WORTH and point.speedup > reached.speedup:
                reached = point
        return reached

    def epoch_seconds(self, way: Way) -> float | None:
        """Returns the predicted seconds of an epoch, without evaluations and checkpoints."""
        return None if self.samples is None else way.time.seconds * -(-self.samples // self.batch_size)

    def run_seconds(self, way: Way) -> float | None:
        """Returns the predicted seconds of the whole run, without evaluations and checkpoints."""
        epoch, limits = self.epoch_seconds(way), list[float]()
        if self.steps is not None:
            limits.append(self.steps * way.time.seconds)
        if epoch is not None and (self.epochs or not limits):
            limits.append(epoch * (self.epochs or 1))
        return min(limits, default=None)

    def _repr_html_(self) -> str:
        """Returns the ways as a table for a notebook, fastest first."""
        rows = [
            (
                way.candidate.words,
                f"{1e3 * way.time.seconds:.1f} ms",
                f"{self.batch_size / way.time.seconds:,.0f}",
                "" if way.needed is None else size_words(way.needed),
                way.algorithm or reason(way),
            )
            for way in self.ways
        ]
        head = ("strategy", "step", "samples/s", "memory", "why")
        return html_table(f"{self.task}, batches of {self.batch_size}", rows, head)

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as JSON-serializable values."""
        enough = self.enough()
        return {
            "task": self.task,
            "batch_size": self.batch_size,
            "samples": self.samples,
            "epochs": self.epochs,
            "steps": self.steps,
            "devices": list(self.devices),
            "ways": [way.as_json() for way in self.ways],
            "curve": [
                {
                    "ranks": each.ranks,
                    "options": each.way.candidate.words,
                    "speedup": each.speedup,
                    "added": each.added,
                }
                for each in self.curve()
            ],
            "enough": None if enough is None else enough.ranks,
            "refused": self.refused,
            "not_considered": self.left_out,
            "repeat_spread": self.repeat_spread,
            "price_per_hour": self.price_per_hour,
            "made_in_seconds": self.seconds,
            "notes": list(self.notes),
            "at_scale": None if self.at_scale is None else dataclasses.asdict(self.at_scale),
        }


def reason(way: Way) -> str:
    """Returns one sentence that says where the time of a step goes, and what that comes from."""
    name, part = way.time.largest()
    compute = way.time.compute / way.time.seconds
    words = {
        "waiting": "waits for the slowest rank",
        "bubble": "idle stages of the pipeline",
        "communication": "messages and updates" if way.costs.is_measured else "messages",
        "update": "the optimizer",
        "input": "waits for samples",
    }[name]
    sentence = f"{compute:.0%} of a step computes" + (f", {part:.0%} is {words}" if part >= 0.02 else "")
    return f"{sentence}; needs {size_words(way.lacking)} more than there is" if way.lacking else sentence
