"""How far estimates of memory are from what a run takes, counted by the same accounting.

    python -m benchmarks.memory [--models "NAME;NAME"] [--optimizers ...] [--strategies ...] [--json FILE]
    python -m benchmarks.memory --resident

Each combination is estimated, and then taken for two steps on ranks that are started once for all of them. The error is
the estimate's peak over the counted one, less 1, of the rank where it is largest. What a strategy refuses is left out,
with its reason. With ``--resident`` estimates for one device are compared with what the system gave a process of its
own, in which there is what no accounting sees: scratch of operators, code that is loaded, memory that was freed and is
kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_models import MODELS, OPTIMIZERS, STRATEGIES, task_of
from benchmarks.results import Table, Value, cell, record
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.launch.launch import launch
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.tools.estimate import RankMemory, estimate_memory
from evener.tools.estimate.measure import measure_memory
from evener.training.engine import Engine

Case = tuple[str, str, str]
"""Model, optimizer and strategy."""


@dataclass(frozen=True)
class Compared:
    """An estimate beside what was counted."""

    case: Case
    estimated: tuple[int, ...]
    """Peaks in bytes, by rank."""
    counted: tuple[int, ...]

    @property
    def error(self) -> float:
        """Of the rank where it is largest, above 0 if the estimate is too high."""
        errors = (a / b - 1 for a, b in zip(self.estimated, self.counted, strict=True))
        return max(errors, key=abs)


def settings_of(case: Case) -> RunConfig:
    return RunConfig(device="cpu", **STRATEGIES[case[2]])


def estimated(cases: list[Case]) -> tuple[dict[Case, tuple[int, ...]], dict[Case, str]]:
    """Peaks by rank, and of what cannot be the reason."""
    peaks, refused = {}, {}
    for case in cases:
        try:
            found = estimate_memory(task_of(*case[:2]), settings_of(case))
        except ConfigurationError as error:
            refused[case] = str(error)
        else:
            peaks[case] = tuple(rank.peak for rank in found.ranks)
    return peaks, refused


def count(cases: list[Case]) -> list[RankMemory]:
    """What this rank takes in each case."""
    torch.set_num_threads(1)
    with Session(device="cpu") as session:
        return [measure_memory(task_of(*case[:2]), settings_of(case), session) for case in cases]


def counted(cases: list[Case]) -> dict[Case, tuple[int, ...]]:
    """Peaks by rank."""
    found: dict[Case, tuple[int, ...]] = {}
    for processes in {STRATEGIES[case[2]]["processes"] for case in cases}:
        own = [case for case in cases if STRATEGIES[case[2]]["processes"] == processes]
        rows = launch(partial(count, own), processes=processes)
        found |= {
            case: tuple(row.peak for row in ranks)
            for case, ranks in zip(own, zip(*rows, strict=True), strict=True)
        }
    return found


def table(rows: list[Compared]) -> Table:
    """A line for each model and optimizer, a column for each strategy: the peak that was counted, and the estimate's
    over it, of the rank where that differs most."""
    names = list(dict.fromkeys(row.case[2] for row in rows))
    cells = {row.case: cell(max(row.counted) / 2**20, "MiB", ratio=1 + row.error) for row in rows}
    made = [
        [f"{model}, {optimizer}", *(cells.get((model, optimizer, name)) for name in names)]
        for model, optimizer in dict.fromkeys(row.case[:2] for row in rows)
    ]
    return Table(["model, optimizer", *names], made, "the estimate over it")


def words(rows: list[Compared]) -> str:
    """The errors in one sentence."""
    errors = [row.error for row in rows]
    return (
        f"{len(rows)} combinations: median error {statistics.median(map(abs, errors)):.2%}, "
        f"most above {max(errors):+.2%}, most below {min(errors):+.2%}"
    )


def grown(model: str) -> int:
    """Bytes by which the resident set of this process grows while it takes the steps, at most."""
    torch.set_num_threads(1)
    task, config = _large(model), RunConfig(device="cpu", strategy="single", steps=4)
    with Session(device="cpu") as session:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
        before = _resident("VmRSS")
        with Engine(task, config, session=session) as engine:
            for batch in engine.batches():
                engine.step(batch)
        return _resident("VmHWM") - before


def _large(model: str) -> Task:
    """With enough samples that the code of operators, which is loaded with their first calls, is little beside them."""
    return dataclasses.replace(task_of(model, "AdamW", 16), batch_size=16 * MODELS[model][2])


def _resident(line: str) -> int:
    found = re.search(rf"^{line}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found
    return 1024 * int(found[1])


def resident(models: list[str]) -> Iterator[list[Value]]:
    """Estimates for one device beside what the system gave the process."""
    for model in models:
        config = RunConfig(device="cpu", strategy="single", processes=1)
        estimate = estimate_memory(_large(model), config).peak
        with get_context("spawn").Pool(1) as processes:
            found = processes.apply(grown, (model,))
        yield [model, cell(estimate / 2**20, "MiB"), cell(found / 2**20, "MiB", ratio=found / estimate)]


def compare(cases: list[Case]) -> tuple[list[Compared], dict[Case, str]]:
    peaks, refused = estimated(cases)
    found = counted(list(peaks))
    return [Compared(case, peaks[case], found[case]) for case in peaks], refused


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, known in (("models", MODELS), ("optimizers", OPTIMIZERS), ("strategies", STRATEGIES)):
        parser.add_argument(
            f"--{name}", type=lambda text: text.split(";"), default=list(known), metavar="NAME;NAME"
        )
    parser.add_argument(
        "--resident", action="store_true", help="compare with the resident set, on one device"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given: Any = parser.parse_args(arguments)
    if given.resident:
        columns = ["model", "estimated", "resident"]
        grown_by = Table(columns, resident(given.models), "resident over estimated")
        record("memory", "beside the resident set, 16 times the batch, AdamW", grown_by)
        return
    rows, refused = compare(list(product(given.models, given.optimizers, given.strategies)))
    record("memory", "beside the same accounting", table(rows))
    errors = [100 * row.error for row in rows]
    most = [cell(each, "%") for each in (statistics.median(map(abs, errors)), max(errors), min(errors))]
    columns = ["combinations", "median error", "most above", "most below"]
    record("memory", "errors of the estimates", Table(columns, [[str(len(rows)), *most]]))
    for case, reason in refused.items():
        print(f"without {', '.join(case)}: {reason}", file=sys.stderr)
    print(words(rows))
    if given.json:
        made = [{"case": row.case, "estimated": row.estimated, "counted": row.counted} for row in rows]
        given.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
