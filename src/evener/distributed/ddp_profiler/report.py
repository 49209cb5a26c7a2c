"""``evener run SCRIPT --observe``: prints at the end a table that shows which rank of a DDP script is slow."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from evener.distributed.ddp_profiler.profiler import DdpProfiler, StepTimes
from evener.distributed.launch.script import ScriptHook
from evener.files import write_json

HEADER = "  rank    steps  samples    before the    input   exchange,  collectives       bytes"
UNITS = "                 a step    collective   waiting   wait, update      a step      a step"


@dataclass(frozen=True)
class Observation:
    """Observations of one rank."""

    rank: int
    steps: int
    mean: StepTimes
    """Mean over all steps except the first."""

    def as_json(self) -> dict[str, Any]:
        """Returns the values as a dict that JSON can hold."""
        times = dataclasses.asdict(self.mean) | {"rest_seconds": self.mean.rest_seconds}
        return {"rank": self.rank, "steps": self.steps, **times}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Observation:
        names = [entry.name for entry in dataclasses.fields(StepTimes)]
        return cls(values["rank"], values["steps"], StepTimes(**{name: values[name] for name in names}))


class DdpObserver(ScriptHook):
    """Profiles DDP training on every rank, and prints a table at the end.

    Args:
        json_path: File for the observations; None for none.
        stream: Where the table is printed; None is standard error.
    """

    def __init__(self, json_path: Path | None = None, stream: TextIO | None = None) -> None:
        self._json_path, self._stream = json_path, stream

    @contextmanager
    def watching(self, rank: int, directory: Path) -> Iterator[None]:
        onlooker = DdpProfiler()
        try:
            with onlooker:
                yield
        finally:
            seen = Observation(rank, onlooker.steps, onlooker.mean)
            write_json(directory / f"observed-{rank}.json", seen.as_json())

    def tell(self, directory: Path) -> None:
        found = [json.loads(path.read_text()) for path in directory.glob("observed-*.json")]
        ranks = sorted((Observation.from_json(values) for values in found), key=lambda seen: seen.rank)
        print(table(ranks), file=self._stream or sys.stderr, flush=True)
        if self._json_path is not None:
            write_json(self._json_path, {"ranks": [seen.as_json() for seen in ranks]})


def table(ranks: Sequence[Observation]) -> str:
    """Returns the table: one line per rank, and which rank is slowest."""
    stepped = [seen for seen in ranks if seen.steps]
    if not stepped:
        return "observed: no step to tell about (a step ends with optimizer.step(); the first is left out)"
    lines = ["observed, on average over the steps but the first (a step ends with optimizer.step()):"]
    lines += [HEADER, UNITS, *map(_line, stepped)]
    if len(stepped) > 1:
        lines.append(_slowest(stepped))
    return "\n".join(lines)


def _line(seen: Observation) -> str:
    mean = seen.mean
    return (
        f"  {seen.rank:>4} {seen.steps:>8,} {mean.samples:>8.1f} {mean.compute_seconds * 1e3:>10.2f} ms "
        f"{mean.input_seconds * 1e3:>6.2f} ms {mean.rest_seconds * 1e3:>9.2f} ms {mean.collectives:>12.1f} "
        f"{_size(mean.nbytes):>11}"
    )


def _slowest(ranks: Sequence[Observation]) -> str:
    slowest = max(ranks, key=lambda seen: seen.mean.compute_seconds + seen.mean.input_seconds)
    share = fmean(_waiting_share(seen.mean, slowest.mean) for seen in ranks if seen is not slowest)
    what = "its data" if slowest.mean.input_seconds > slowest.mean.compute_seconds else "its work"
    return f"  rank {slowest.rank} is slowest, by {what}: the others wait {share:.0%} of a step for it"


def _waiting_share(mean: StepTimes, slowest: StepTimes) -> float:
    """Returns the fraction of a rank's step, from 0 to 1, in which it waits for the slowest rank.

    The rest of a step, besides work and input, is synchronization, update and waiting. The slowest rank does not wait,
    so the difference of the two ranks' rests is the waiting.
    """
    waiting = max(0.0, mean.rest_seconds - slowest.rest_seconds)
    return waiting / mean.seconds if waiting else 0.0


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
