"""Size, time and memory of ``evener report`` for run directories of many steps and ranks, with and without their index.

python -m benchmarks.report [--sizes 1000x4 100000x16 1000000x64] [--home DIRECTORY]

The records are made up, in the form of those of a run on CPUs. Those of a million steps on 64 ranks take 10 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.results import Table, Value, cell, record
from evener.core.record_index import INDEX, RecordIndexWriter
from evener.core.records import RECORDS, StepRecord, as_json
from evener.files import dumps

PURPOSES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")
KINDS = 61
"""Different rows of numbers by rank, which take turns."""


def step_record(ranks: int, random: np.random.Generator) -> StepRecord:
    """A step whose numbers by rank are random."""

    def seconds(mean: float) -> tuple[float, ...]:
        return tuple((mean * random.lognormal(0, 0.1, ranks)).tolist())

    def nbytes(mean: float) -> tuple[int, ...]:
        return tuple(random.integers(int(mean), int(1.1 * mean), ranks).tolist())

    return StepRecord(
        step=0,
        epoch=0,
        loss=0.0,
        samples=8 * ranks,
        seconds=0.0,
        shares=(8,) * ranks,
        lr=0.1,
        compute_seconds=seconds(0.1),
        wait_seconds=seconds(0.02),
        input_seconds=seconds(1e-4),
        forward_seconds=seconds(0.03),
        memory_held=nbytes(1e9),
        memory_peak=nbytes(1.2e9),
        memory_parts={name: nbytes(2e8) for name in PURPOSES},
    )


def write_run(directory: Path, steps: int, ranks: int) -> None:
    """Writes a run directory."""
    random = np.random.default_rng(1)
    records = [as_json(step_record(ranks, random)) for _ in range(KINDS)]
    tails = [dumps(each).partition(', "shares"')[2] for each in records]
    losses = (2 / np.sqrt(1 + np.arange(steps)) + 0.1 * random.random(steps)).tolist()
    times = (0.12 * random.lognormal(0, 0.1, steps)).tolist()
    index = RecordIndexWriter(directory / RECORDS)
    with (directory / RECORDS).open("wb", buffering=1 << 20) as file:
        for number, (loss, seconds) in enumerate(zip(losses, times, strict=True)):
            head = {"kind": "step", "step": number, "epoch": number // 1000, "loss": loss}
            head |= {"samples": 8 * ranks, "seconds": seconds}
            line = f'{json.dumps(head)[:-1]}, "shares"{tails[number % KINDS]}\n'.encode()
            file.write(line)
            index.add(records[number % KINDS] | head, len(line))
    index.close()


def measured(directory: Path, name: str) -> tuple[float, float, Path]:
    """Seconds, and the peak of memory of the command in MiB; and the page that it has written."""
    page = directory / f"{name}.html"
    began = time.perf_counter()
    command = [sys.executable, "-m", "evener", "report", str(directory), "--out", str(page)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    return seconds, usage.ru_maxrss / 1024, page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=["1000x4", "100000x16"])
    parser.add_argument("--home", type=Path)
    given = parser.parse_args()
    columns = ["steps x ranks", "records", "page", "with the index", "memory", "without", "memory", "bytes"]
    record("report", "runs that were made up", Table(columns, map(partial(row, given.home), given.sizes)))


def row(home: Path | None, size: str) -> list[Value]:
    steps, ranks = map(int, size.split("x"))
    with tempfile.TemporaryDirectory(dir=home) as place:
        directory = Path(place) / "run"
        directory.mkdir()
        write_run(directory, steps, ranks)
        *indexed, page = measured(directory, "with")
        (directory / INDEX).unlink()
        *scanned, other = measured(directory, "without")
        sizes = [(directory / RECORDS).stat().st_size / 1e6, page.stat().st_size / 1e6]
        same = page.read_bytes() == other.read_bytes()
        costs = [
            cell(each, unit)
            for found in (indexed, scanned)
            for each, unit in zip(found, ("s", "MiB"), strict=True)
        ]
        return [size, *(cell(each, "MB") for each in sizes), *costs, "the same" if same else "DIFFERENT"]


if __name__ == "__main__":
    main()
