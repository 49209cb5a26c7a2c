"""What the death of a rank costs: seconds that are lost, and steps that are done once more.

    python -m benchmarks.recovery [--turns 3] [--kills 3] [--every 20] [--arms NAME,NAME]

==================  ===================================================================================================
evener from memory  ``evener train --max-restarts N --save-every 20steps``: one rank starts again, the others stay
evener from file    ... ``--recover file``: all start again from the last checkpoint
torchrun by hand    a DDP loop that writes model and optimizer by ``torch.save`` on rank 0 every 20 steps and reads them
                    when it starts, under ``torchrun --max-restarts N``
==================  ===================================================================================================

Three ranks train the digits. At seeded steps, the same for all arms, a rank that is drawn gets SIGKILL. The number of
steps is a buffer of the model: it goes where the weights go, into a checkpoint and back, so that it says which step a
pass belongs to whatever has happened. Rank 0 writes its time down at the beginning of each.

::

    rank 0 begins   8    9          8    9   10   11   12
                         | kill     |                   |
                         |<- back ->|                   |
                         |<- lost, but for three steps->|

No rank can begin the third step after the one in which it was when another died, unless the dead one was replaced: the
dead may have been one step ahead. *Lost* is the time until then, less what three steps take; *again* the steps in it
that were begun before; *back* the time until the longest silence in it is over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import evener
from benchmarks.results import Table, cell, record, spread
from evener.training.builtin_tasks import digits

PLACE = "EVENER__RECOVERY"
"""The variable that names the directory in which ranks tell of themselves."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Without it, ranks that torchrun has started again find gloo's addresses of the first start in the store that it
shares with them, and cannot connect (torch 2.13)."""
AHEAD = 3
SPACING = 80
"""Steps from one death to the next, about."""


class Counted(nn.Module):
    """A model that knows how many steps it was trained for, and tells of each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._is_written = False

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self._report(int(self.steps))
            self.steps += 1
        scores: Tensor = self.model(images)
        return scores

    def _report(self, step: int) -> None:
        place, rank = Path(os.environ[PLACE]), os.environ["RANK"]
        if not self._is_written:
            self._is_written = True
            partial = place / f"partial-{rank}"
            partial.write_text(str(os.getpid()))
            partial.replace(place / f"pid-{rank}")
        if rank == "0":
            with (place / "steps").open("a") as file:
                file.write(json.dumps([time.time(), step]) + "\n")


def task() -> evener.Task:
    return dataclasses.replace(
        digits.task(), model=lambda: Counted(digits.model()), evaluate=None, metrics={}, epochs=1000
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run, and where it is disturbed."""

    ranks: int
    every: int
    deaths: tuple[tuple[int, int, float], ...]
    """Of each the step, the rank, and the seconds after the beginning of the step."""

    @property
    def steps(self) -> int:
        return SPACING * (len(self.deaths) + 1)

    @property
    def restarts(self) -> int:
        return len(self.deaths) + 1

    @classmethod
    def drawn(cls, ranks: int, every: int, kills: int, seed: int) -> Plan:
        source = random.Random(seed)
        first = range(SPACING // 2, SPACING * kills, SPACING)
        return cls(
            ranks,
            every,
            tuple(
                (step + source.randrange(SPACING // 2), source.randrange(ranks), source.uniform(0, 0.02))
                for step in first
            ),
        )


# The arms


def evener_train(*options: str) -> Callable[[Plan, Path], list[str]]:
    """The command, with ``{every}`` and ``{restarts}`` of the plan put into its options."""

    def command(plan: Plan, place: Path) -> list[str]:
        usual = [
            *("--processes", plan.ranks, "--device", "cpu", "--steps", plan.steps),
            "--run-dir",
            place / "run",
        ]
        given = [option.format(every=plan.every, restarts=plan.restarts) for option in options]
        words = ["-m", "evener.cli.main", "train", "benchmarks.recovery:task", *usual, *given]
        return [sys.executable, *map(str, words)]

    return command


def torchrun(plan: Plan, place: Path) -> list[str]:
    """This file again, as the script of one who knows DDP."""
    started = ["--standalone", "--nproc-per-node", plan.ranks, "--max-restarts", plan.restarts]
    script = ["-m", "benchmarks.recovery", "--contender", place, "--every", plan.every, "--until", plan.steps]
    return ["env", OWN_STORE, sys.executable, "-m", "torch.distributed.run", *map(str, [*started, *script])]


SAVING = ("--max-restarts", "{restarts}", "--save-every", "{every}steps")

ARMS: Mapping[str, Callable[[Plan, Path], list[str]]] = {
    "evener from memory": evener_train(*SAVING),
    "evener from file": evener_train(*SAVING, "--recover", "file"),
    "torchrun by hand": torchrun,
}
"""The command of each. Another way of Evener's to recover is another line of options."""


def train_by_hand(place: Path, every: int, until: int) -> None:
    """The loop of whoever writes checkpoints by hand: what is done since the last one is done again."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole, checkpoint = task(), place / "checkpoint.pt"
    model: nn.Module = DistributedDataParallel(whole.model())  # type: ignore[arg-type]
    optimizer = whole.optimizer(model.parameters())  # type: ignore[operator]
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for images, labels in batches(whole, step, until):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step += 1
        if step % every == 0 and dist.get_rank() == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial
            )
            partial.replace(checkpoint)
    dist.destroy_process_group()


def batches(whole: Any, step: int, until: int) -> Iterator[Any]:
    """Those that follow ``step`` others, in an order that is drawn anew for each epoch."""
    sampler = DistributedSampler(whole.train)
    loader = DataLoader(whole.train, batch_size=whole.batch_size // dist.get_world_size(), sampler=sampler)
    begun = step - step % len(loader)
    while begun < until:
        sampler.set_epoch(begun // len(loader))
        for batch in loader:
            if step <= begun < until:
                yield batch
            begun += 1


# Measuring


class Begun(NamedTuple):
    """The beginning of a step on rank 0."""

    time: float
    step: int


class Cost(NamedTuple):
    """Of one death."""

    lost: float
    back: float
    again: int


def begun_in(place: Path) -> list[Begun]:
    path = place / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Begun(*json.loads(line)) for line in lines if line.endswith("]")]


def last_step(place: Path) -> int:
    """The last that was begun; -1 for none."""
    path = place / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])[1]) if lines and lines[-1].endswith("]") else -1


def kill(plan: Plan, place: Path, program: subprocess.Popen[str]) -> list[float]:
    """Kills as planned; returns when."""
    times = []
    for step, rank, delay in plan.deaths:
        while last_step(place) < step:
            if program.poll() is not None:
                raise RuntimeError(f"ended before step {step}:\n{program.communicate()[1][-2000:]}")
            time.sleep(0.01)
        time.sleep(delay)
        times.append(time.time())
        os.kill(int((place / f"pid-{rank}").read_text()), signal.SIGKILL)
    return times


def usual_seconds(begun: list[Begun]) -> float:
    """Of a step."""
    return statistics.median(b.time - a.time for a, b in pairwise(begun) if b.step == a.step + 1)


def cost_of(killed: float, begun: list[Begun], usual: float) -> Cost:
    """What the death at this time cost, as the picture above has it."""
    last = max((each for each in begun if each.time <= killed), key=lambda each: each.time)
    after = [each for each in begun if each.time > killed]
    level = next(number for number, each in enumerate(after) if each.step == last.step + AHEAD)
    window = [Begun(killed, last.step), *after[: level + 1]]
    back = max(pairwise(window), key=lambda pair: pair[1].time - pair[0].time)[1]
    return Cost(after[level].time - killed - AHEAD * usual, back.time - killed, level + 1 - AHEAD)


def suffer(arm: str, plan: Plan) -> tuple[list[Cost], float]:
    """One run of an arm with all its deaths: the cost of each, and the usual seconds of a step."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        program = subprocess.Popen(
            ARMS[arm](plan, place),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {PLACE: name, "OMP_NUM_THREADS": "1"},
        )
        times = kill(plan, place, program)
        told = program.communicate(timeout=300)[1]
        if program.returncode:
            raise RuntimeError(f"{arm} ended with status {program.returncode}:\n{told}")
        begun = begun_in(place)
    usual = usual_seconds(begun)
    return [cost_of(killed, begun, usual) for killed in times], usual


def report(costs: Mapping[str, list[Cost]], usual: Mapping[str, list[float]]) -> Table:
    rows = []
    for arm, found in costs.items():
        lost, back, again = zip(*found, strict=True)
        seconds = [cell(statistics.median(each), "s", spread=spread(each)) for each in (lost, back)]
        step = cell(1e3 * statistics.median(usual[arm]), "ms")
        rows.append([arm, *seconds, cell(statistics.median(again)), step])
    return Table(["way to go on", "lost a death", "back", "steps again", "a step"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="in a run")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS), metavar="NAME,...", help="some of the above")
    parser.add_argument("--contender", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        train_by_hand(given.contender, given.every, given.until)
        return
    costs: dict[str, list[Cost]] = {arm: [] for arm in given.arms.split(",")}
    usual: dict[str, list[float]] = {arm: [] for arm in costs}
    for turn in range(given.turns):
        plan = Plan.drawn(given.processes, given.every, given.kills, seed=turn)
        for arm in costs:
            found, seconds = suffer(arm, plan)
            costs[arm] += found
            usual[arm].append(seconds)
            print(f"turn {turn}, {arm}: {', '.join(f'{cost.lost:.2f} s' for cost in found)}", file=sys.stderr)
    beside = f"{given.turns * given.kills} deaths of each, a checkpoint every {given.every} steps"
    record("recovery", f"{given.processes} ranks", report(costs, usual), beside=beside)


if __name__ == "__main__":
    main()
