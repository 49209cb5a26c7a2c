"""``evener run SCRIPT --observe``: prints at the end a table that shows which rank of a script is slow."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from evener.core.config.sizes import size_words
from evener.distributed.ddp_profiler.profiler import DdpProfiler
from evener.distributed.ddp_profiler.rank_file import RankFileReader, RankFileWriter, step_files
from evener.distributed.ddp_profiler.step_times import StepTimes
from evener.distributed.launch.script import ScriptHook
from evener.files import write_json

HEADER = "  rank    steps  samples   forward  backward  exchange     input    update   calls       bytes"
UNITS = "                  a step        ms   ms a step        ms        ms        ms  a step      a step"
HARDLY = 0.05
"""Part of a step below which waiting for the slowest rank is not worth a word."""


@dataclass(frozen=True)
class Observation:
    """Observations of one rank."""

    rank: int
    steps: int
    mean: StepTimes
    """Mean over all steps except the first."""
    collectives: list[dict[str, Any]] = field(default_factory=list)
    """All calls in these steps: ``name``, ``nbytes`` of one call, and ``calls``."""
    failure: str = ""
    """The error in the profiler that ended the observation; empty if there was none."""
    busy_seconds: float = 0.0
    """CPU time of all threads of the rank since its first step; 0 if its steps are not written."""
    queued_seconds: float = 0.0
    """Time in which a thread could have run and had no core."""

    def as_json(self) -> dict[str, Any]:
        """Returns the values as a dict that JSON can hold."""
        mean = self.mean
        times = dataclasses.asdict(mean) | {
            "compute_seconds": mean.compute_seconds,
            "rest_seconds": mean.rest_seconds,
        }
        about = {
            "collectives_by_size": self.collectives,
            "failure": self.failure,
            "busy_seconds": self.busy_seconds,
            "queued_seconds": self.queued_seconds,
        }
        return {"rank": self.rank, "steps": self.steps, **times, **about}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Observation:
        names = [entry.name for entry in dataclasses.fields(StepTimes)]
        mean = StepTimes(**{name: values[name] for name in names})
        about = (
            values[name] for name in ("collectives_by_size", "failure", "busy_seconds", "queued_seconds")
        )
        return cls(values["rank"], values["steps"], mean, *about)


class DdpObserver(ScriptHook):
    """Profiles a script on every rank, and prints a table at the end.

    Args:
        json_path: File for the observations; None for none.
        stream: Where the table is printed; None is standard error.
        records: Whether each rank also writes its steps as they happen, by a `RankFileWriter`.
    """

    def __init__(
        self, json_path: Path | None = None, stream: TextIO | None = None, records: bool = False
    ) -> None:
        self._json_path, self._stream, self._records = json_path, stream, records

    @contextmanager
    def watching(self, rank: int, directory: Path) -> Iterator[None]:
        writer = RankFileWriter(directory) if self._records else None
        onlooker = DdpProfiler(None if writer is None else writer.write)
        try:
            with onlooker:
                yield
        finally:
            if writer is not None:
                writer.close()
            kinds = [
                {"name": name, "nbytes": nbytes, "calls": calls}
                for (name, nbytes), calls in sorted(onlooker.kinds.items())
            ]
            cpu = (0.0, 0.0) if writer is None else writer.cpu_seconds()
            seen = Observation(rank, onlooker.steps, onlooker.mean, kinds, onlooker.failure, *cpu)
            write_json(directory / f"observed-{rank}.json", seen.as_json())

    @contextmanager
    def following(self, directory: Path) -> Iterator[None]:
        try:
            yield
        finally:
            ranks = observations(directory)
            print(table(ranks), file=self._stream or sys.stderr, flush=True)
            if self._json_path is not None:
                write_json(self._json_path, {"ranks": [seen.as_json() for seen in ranks]}, follow=True)


def observations(directory: Path) -> list[Observation]:
    """Returns what the ranks have left in the launcher's directory, in order of rank.

    Of a rank that was killed, only its steps are known, and only if they were written.
    """
    left = [json.loads(path.read_text()) for path in directory.glob("observed-*.json")]
    found = {seen.rank: seen for seen in map(Observation.from_json, left)}
    for path in step_files(directory):
        with closing(RankFileReader(path)) as reader:
            if reader.rank not in found:
                reader.read()
                rows = [row.step.numbers for row in reader.rows][1:]
                mean = StepTimes(*map(fmean, zip(*rows, strict=True))) if rows else StepTimes()
                found[reader.rank] = Observation(reader.rank, len(rows), mean)
    return sorted(found.values(), key=lambda seen: seen.rank)


def table(ranks: Sequence[Observation]) -> str:
    """Returns the table: one line per rank, and which rank is slowest."""
    stepped = [seen for seen in ranks if seen.steps]
    lines = [
        f"rank {seen.rank} was not observed to its end: {seen.failure}" for seen in ranks if seen.failure
    ]
    if not stepped:
        none = "observed: no step to tell about (a step ends with optimizer.step(); the first is left out)"
        return "\n".join([none, *lines])
    head = "observed, on average over the steps but the first (a step ends with optimizer.step()):"
    lines = [head, HEADER, UNITS, *map(_line, stepped), *lines]
    if len(stepped) > 1:
        lines.append(_slowest(stepped))
    return "\n".join(lines)


def _line(seen: Observation) -> str:
    mean = seen.mean
    parts = ("forward", "backward", "exchange", "input", "update")
    times = "".join(f"{1e3 * getattr(mean, f'{part}_seconds'):>10.2f}" for part in parts)
    return (
        f"  {seen.rank:>4} {seen.steps:>8,} {mean.samples:>8.1f}{times} {mean.collectives:>7.1f} "
        f"{size_words(mean.nbytes):>11}"
    )


def _slowest(ranks: Sequence[Observation]) -> str:
    slowest = max(ranks, key=lambda seen: seen.mean.compute_seconds + seen.mean.input_seconds)
    others = [seen.mean for seen in ranks if seen is not slowest]
    share = fmean(_waiting_share(mean, slowest.mean) for mean in others)
    if share < HARDLY:
        return f"  no rank is slow: the others wait {share:.0%} of a step for rank {slowest.rank}"
    parts = {"its forward pass": "forward", "its backward pass": "backward", "its data": "input"}
    more = {
        words: getattr(slowest.mean, f"{part}_seconds")
        - fmean(getattr(mean, f"{part}_seconds") for mean in others)
        for words, part in parts.items()
    }
    what = max(more, key=more.__getitem__)
    return f"  rank {slowest.rank} is slowest, by {what}: the others wait {share:.0%} of a step for it"


def _waiting_share(mean: StepTimes, slowest: StepTimes) -> float:
    """Returns the fraction of a rank's step, from 0 to 1, in which it waits for the slowest rank.

    The rest of a step, besides work and input, is synchronization, update and waiting. The slowest rank does not wait,
    so the difference of the two ranks' rests is the waiting.
    """
    waiting = max(0.0, mean.rest_seconds - slowest.rest_seconds)
    return waiting / mean.seconds if waiting else 0.0
