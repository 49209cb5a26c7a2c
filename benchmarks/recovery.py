"""What the death of a rank costs: seconds until the run is where it was, and steps that are done once more.

    python -m benchmarks.recovery [--turns 3] [--every 20] [--kill-at 70]

========  ============================================================================================================
evener    ``evener.fit(..., save_every="20steps")`` with ``max_restarts``: all start again from the last checkpoint
torchrun  a DDP loop with a checkpoint written by hand (``torch.save`` on rank 0 every 20 steps, read at the start),
          under ``torchrun --max-restarts``
========  ============================================================================================================

Two ranks train a perceptron on the digits; rank 1 is killed when rank 0 has taken so many steps. Both write the time
of each step into a file. *Back* is the time from the kill to the next step, *level* to the first step beyond the last
one before the kill. Recovery in memory, without a file, Evener does not do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import evener
from benchmarks.interleaved import machine
from evener.observer import Observer
from evener.records import StepRecord
from evener.runtime.rendezvous import Rendezvous
from evener.tasks import digits

EPOCHS = 8


def tell(path: Path, step: int, pid: int) -> None:
    with path.open("a") as file:
        file.write(json.dumps([time.time(), step, pid]) + "\n")


def own_pid(path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(str(os.getpid()))
    partial.replace(path)


class Times(Observer):
    """The time of each step, and the process of rank 1."""

    everywhere = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, record: StepRecord) -> None:
        rank = dist.get_rank()
        if rank == 0:
            tell(self.path, record.step, os.getpid())
        elif record.step % 10 == 0:
            own_pid(self.path.with_suffix(".pid"))


def run_evener(directory: Path, every: int) -> None:
    evener.fit(
        digits.task(),
        processes=2,
        device="cpu",
        epochs=EPOCHS,
        batch_size=64,
        evaluate_every=0,
        run_dir=directory / "run",
        save_every=f"{every}steps",
        rendezvous=Rendezvous(max_restarts=1),
        observers=[Times(directory / "times")],
        show=False,
    )


def run_by_hand(directory: Path, every: int) -> None:
    """What users write who know DDP."""
    dist.init_process_group("gloo")
    rank, place, task = dist.get_rank(), directory / "checkpoint.pt", digits.task()
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model())  # type: ignore[arg-type]
    optimizer = task.optimizer(model.parameters())  # type: ignore[operator]
    sampler = DistributedSampler(task.train)
    step = 0
    if place.exists():
        state = torch.load(place, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    loader = DataLoader(task.train, batch_size=32, sampler=sampler)
    first, skip = divmod(step, len(loader))
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            if epoch == first and number < skip:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if rank == 0:
                tell(directory / "times", step, os.getpid())
            elif step % 10 == 0:
                own_pid(directory / "times.pid")
            step += 1
            if step % every == 0 and rank == 0:
                partial = place.with_suffix(".partial")
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial
                )
                partial.replace(place)
    dist.destroy_process_group()


def command(contender: str, directory: Path, every: int) -> list[str]:
    itself = ["-m", "benchmarks.recovery", "--run", contender, str(directory), "--every", str(every)]
    if contender == "evener":
        return [sys.executable, *itself]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    return [sys.executable, *torchrun, *itself]


def times_in(directory: Path) -> list[tuple[float, int, int]]:
    path = directory / "times"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]  # type: ignore[misc]


def suffer(contender: str, every: int, kill_at: int) -> dict[str, float]:
    """One run with one death."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        program = subprocess.Popen(
            command(contender, directory, every), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not any(step >= kill_at for _, step, _ in times_in(directory)):
            assert program.poll() is None, "the run ended before"
            time.sleep(0.01)
        killed = time.time()
        os.kill(int((directory / "times.pid").read_text()), signal.SIGKILL)
        assert program.wait(300) == 0
        found = times_in(directory)
    before = [step for moment, step, _ in found if moment <= killed + 0.5 and step < kill_at + every * 10]
    first = found[0][2]
    after = [(moment, step) for moment, step, pid in found if pid != first]
    last = max(step for _, step, pid in found if pid == first)
    level = next(moment for moment, step in after if step > last)
    assert before
    return {
        "back, s": after[0][0] - killed,
        "level, s": level - killed,
        "steps lost": float(last + 1 - after[0][1]),
    }


def report(rows: dict[str, list[dict[str, float]]], headings: Sequence[str]) -> None:
    print("| | " + " | ".join(headings) + " |\n|" + "---|" * (len(headings) + 1))
    for name, turns in rows.items():
        cells = [f"{statistics.median(turn[heading] for turn in turns):.2f}" for heading in headings]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=70)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given: Any = parser.parse_args()
    if given.run:
        run = run_evener if given.run[0] == "evener" else run_by_hand
        run(Path(given.run[1]), given.every)
        return
    rows: dict[str, list[dict[str, float]]] = {"evener": [], "torchrun": []}
    for _ in range(given.turns):
        for name, turns in rows.items():
            turns.append(suffer(name, given.every, given.kill_at))
    print(f"{machine()}, 2 ranks, {given.turns} turns\n")
    report(rows, ["back, s", "level, s", "steps lost"])


if __name__ == "__main__":
    main()
