"""What killed ranks cost in asynchronous training and with ddp: the goodput, and samples lost or doubled.

``evener train --max-restarts N`` on 3 ranks, 40 batches of a second each, by sleeping: as long as in large trainings.
After 10 batches rank 1 gets SIGKILL, and after 30 rank 2, so that there is a death for 20 batches.

*Goodput* is the time of the undisturbed run over that of the disturbed one, for the same samples: each from the first
pass to the last, so that the start of the run is in neither.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.drawn import rand, randint
from benchmarks.results import Table, Value, cell, record

PLACE, SECONDS = "EVENER__KILLS", "EVENER__KILLS_SECONDS"
"""The variables with the directory in which ranks tell of themselves, and with the seconds of a batch."""
RANKS, BATCH_SIZE, BATCHES, EVERY, BATCH_SECONDS = 3, 48, 40, 20, 1.0


class Tracked(nn.Sequential):
    """A network that sleeps, and writes down when it has computed how many samples."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self._each = float(os.environ.get(SECONDS, "0")) * RANKS / BATCH_SIZE
        self._is_written = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            place, rank = Path(os.environ[PLACE]), os.environ["RANK"]
            if not self._is_written:
                self._is_written = True
                partial = place / f"partial-{rank}"
                partial.write_text(str(os.getpid()))
                partial.replace(place / f"pid-{rank}")
            began = time.time()
            time.sleep(self._each * len(inputs))
            with (place / f"passes-{rank}").open("a") as file:
                file.write(json.dumps([began, time.time(), len(inputs)]) + "\n")
        scores: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return scores


def task() -> evener.Task:
    size = BATCHES * BATCH_SIZE
    return evener.Task(
        model=Tracked,
        train=TensorDataset(rand(size, 16), randint(4, (size,))),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=BATCH_SIZE,
    )


class Disturbed(NamedTuple):
    """One run: its seconds from the first pass to the last, and samples that were lost and doubled."""

    seconds: float
    lost: int
    doubled: int


def passes_in(place: Path) -> list[tuple[float, float, int]]:
    """Of each pass the begin, the end and the number of samples."""
    lines = [line for path in place.glob("passes-*") for line in path.read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def train(way: str, kills: int, seed: int = 0) -> Disturbed:
    """Runs the command with a strategy, and kills ranks."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        options = ["--processes", RANKS, "--device", "cpu", "--epochs", 1, "--save-every", "1h"]
        options += ["--strategy", way, "--max-restarts", kills + 1, "--run-dir", place / "run"]
        command = ["-m", "evener.cli.main", "train", "benchmarks.asynchronous_kills:task", *options]
        program = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {PLACE: name, SECONDS: str(BATCH_SECONDS), "OMP_NUM_THREADS": "1"},
        )
        killed: list[int] = []
        while len(killed) < kills and program.poll() is None:
            time.sleep(0.02)
            done = sum(size for *_, size in passes_in(place))
            path = place / f"pid-{1 + len(killed) % (RANKS - 1)}"
            is_due = done >= EVERY * BATCH_SIZE * (len(killed) + 0.5)
            if is_due and path.exists() and (pid := int(path.read_text())) not in killed:
                time.sleep(draw.uniform(0, BATCH_SECONDS))
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        told = program.communicate(timeout=400)[1]
        if program.returncode:
            raise RuntimeError(f"{way} ended with status {program.returncode}:\n{told}")
        found = passes_in(place)
        lost, doubled = lost_and_doubled(place / "run", BATCHES * BATCH_SIZE)
        return Disturbed(max(end for _, end, _ in found) - min(begin for begin, *_ in found), lost, doubled)


def lost_and_doubled(run: Path, size: int) -> tuple[int, int]:
    """Counts samples that no update holds, and samples that more than one does, by the records."""
    held: Counter[int] = Counter()
    at = 0
    for step in map(json.loads, (run / "records.jsonl").read_text().splitlines()):
        if step["kind"] == "step":
            ranges = [each[2:] for merge in step.get("merges") or () for each in merge] or [
                (0, step["samples"])
            ]
            for start, stop in ranges:
                held.update(range(at + start, at + stop))
            at += step["samples"]
    return sum(not held[sample] for sample in range(size)), sum(count > 1 for count in held.values())


def compare(ways: Sequence[str] = ("asynchronous", "ddp")) -> None:
    """Shows the goodput of each strategy."""

    def row(way: str) -> list[Value]:
        deaths = BATCHES // EVERY
        calm, other = train(way, 0), train(way, deaths)
        seconds = calm.seconds, other.seconds, (other.seconds - calm.seconds) / deaths
        counts = calm.seconds / other.seconds, other.lost, other.doubled
        return [way, *(cell(each, "s") for each in seconds), *map(cell, counts)]

    columns = ["strategy", "calm", "disturbed", "a death", "goodput", "samples lost", "samples doubled"]
    record("asynchronous", "killed ranks", Table(columns, map(row, ways)))
