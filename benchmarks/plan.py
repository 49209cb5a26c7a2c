"""How far predictions of ``evener plan`` are from what steps take, in ways and at sizes that its trials never saw.

    python -m benchmarks.plan [--tasks "NAME;NAME"] [--seconds S] [--only time,memory] [--json FILE]
    python -m benchmarks.plan --summary FILE FILE ...

Each task is calibrated once, with 1 to 4 CPU ranks. Before and after, real steps are taken in each case, on ranks that
are started anew for each number of them. So the difference of these two repeats stands beside each error. The measured
time is the mean of the repeats, and each is the median of its steps.

Two cores of a virtual machine are at times worth little more than one, for some tens of seconds. So two threads, or
ranks, are timed beside one before and after each case; if they were worth less than ``LEAST_WORTH``, it waits for a
better time and measures the case again, a few times. The trials of a plan have no such help.

=========  ============================================================================================
seen       all ways at the batch size of the calibration; the regret is the time of the plan's first one
           over that of the fastest, and their median error, which all ways share, is called the machine's drift
batch      batches of half, one and a half and three times that size
throttle   a rank at half or a quarter of its speed, with equal, fixed and learned shares
micro      batches that are cut into micro-batches
=========  ============================================================================================

``memory`` gives ranks the least memory with which a plan says that they fit, counts those that run out, and compares
peaks; shared memory is needed besides, and not among what a rank took.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_models import task_of
from benchmarks.results import Cell, Table, Value, cell, record
from evener.core.config.run_config import RunConfig
from evener.distributed.launch.launch import launch
from evener.distributed.session import Session
from evener.errors import EvenerError
from evener.tools.estimate import estimate_memory
from evener.tools.plan.calibration import Calibration
from evener.tools.plan.candidates import Candidate, candidates_for
from evener.tools.plan.costs import StepTime, step_time
from evener.tools.plan.plan import calibrate, predicted
from evener.tools.plan.result import HEADROOM
from evener.tools.plan.trials import quiet
from evener.training.engine import Engine

TASKS = {"convolutions": 64, "ResNet": 8, "LSTM": 16, "embeddings": 512, "GPT, tied": 8}
"""Batch sizes at which a step of one rank takes 5 to 60 ms on 2 cores."""
NUMBERS = 1, 2, 3, 4
SIZES = 0.5, 1.5, 3
KINDS = "seen", "batch", "throttle", "micro"
STEPS, SECONDS = 20, (0.5, 2.0)
"""Each repeat takes so many steps, but for at least and at most so long."""
WARM_STEPS, LEARNING_STEPS = 5, 50
WIDTH, LEAST_WORTH = 512, 1.6
MOST_WAITS, WAIT_SECONDS, MOST_REPEATS = 4, 2.0, 2
HELD = "intervals hold", "repeats"
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """What is predicted and measured."""

    kind: str
    candidate: Candidate
    batch_size: int
    throttle: str | None = None
    balance: str = "equal"

    @property
    def words(self) -> str:
        """The options of ``evener train`` that ask for it."""
        shares = f" --throttle {self.throttle} --balance {self.balance}" if self.throttle else ""
        return f"{self.candidate.words}{shares}"

    def config(self) -> RunConfig:
        base = RunConfig(device="cpu", throttle=self.throttle, balance=self.balance)
        return self.candidate.config(base, self.batch_size)


@dataclass(frozen=True)
class Row:
    """A prediction beside its measurements, in seconds."""

    task: str
    kind: str
    words: str
    batch_size: int
    predicted: float
    low: float
    high: float
    measured: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.geometric_mean(self.measured)

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1

    @property
    def repeat_spread(self) -> float:
        return max(self.measured) / min(self.measured) - 1

    @property
    def is_held(self) -> bool:
        """Whether the interval holds it."""
        return self.low <= self.seconds <= self.high


def task_named(name: str) -> Any:
    """The task, as a function that ranks can be sent."""
    times = 6 * TASKS[name] // task_of(name, "AdamW").batch_size  # whole batches of every size in an epoch
    return partial(task_of, name, "AdamW", times)


def cases_of(ways: Sequence[Candidate], batch_size: int) -> Iterator[Case]:
    """All ways at the calibrated size, each at one other size, and the usual ones in all."""
    for place, way in enumerate(ways):
        yield Case("seen", way, batch_size)
        for k, times in enumerate(SIZES):
            if (way.strategy in ("single", "ddp") and way.ranks < 3) or place % len(SIZES) == k:
                yield Case("batch", way, int(batch_size * times))
    one, two = Candidate(1, "single"), Candidate(2, "ddp")
    for balance in ("equal", "auto", "2,1"):
        yield Case("throttle", two, batch_size, "1,0.5", balance)
    zero = Candidate(2, "sharded", ("zero=2",))
    yield Case("throttle", zero, 2 * batch_size, "1,0.25", "auto")
    yield Case("micro", replace(one, micro_batch=batch_size // 2), batch_size)
    yield Case("micro", replace(two, micro_batch=batch_size // 2), batch_size)
    yield Case("micro", replace(two, micro_batch=batch_size // 2), 2 * batch_size)


def way_of(case: Case) -> Candidate:
    """What was calibrated for the case: micro-batches were not."""
    return replace(case.candidate, micro_batch=None)


def prediction(calibration: Calibration, case: Case) -> StepTime:
    """As a plan makes it; with further passes for micro-batches."""
    costs = calibration.costs[way_of(case)]
    if case.candidate.micro_batch is None:
        return predicted(costs, way_of(case), case.config(), case.batch_size)
    return step_time(costs, case.batch_size, passes=-(-case.batch_size // case.candidate.micro_batch))


def steps_on_rank(task: Any, cases: Sequence[Case]) -> list[float | None]:
    """The median seconds of a step in each case, None where the task cannot be trained so."""
    built, found, refused = task(), list[float | None](), set[Candidate]()
    with Session(device="cpu", timeout_seconds=TIMEOUT_SECONDS) as session, quiet():
        for case in cases:
            try:
                found.append(None if case.candidate in refused else _steady_step(built, case, session))
            except EvenerError:
                refused.add(case.candidate)
                found.append(None)
    return found


def worth_of_two(session: Session) -> float:
    """How many times as much two cores compute together as one alone: with two threads of one rank, or with two ranks.
    All ranks must call this together."""
    both = torch.ones(2, WIDTH, WIDTH)

    def seconds(threads: int, count: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        torch.bmm(both[:count], both[:count])
        return time.perf_counter() - began

    own = torch.get_num_threads()
    try:
        alone = together = math.inf
        for _ in range(5):  # the first is slower, and others may take a core for a moment
            if session.world_size == 1:
                alone, together = min(alone, seconds(1, 2)), min(together, seconds(2, 2))
                continue
            took = seconds(1, 2) if session.rank == 0 else 0.0
            alone = min(alone, max(each[0] for each in session.control.exchange([took]).wait()))
            took = seconds(1, 1) if session.rank < 2 else 0.0
            together = min(together, max(each[0] for each in session.control.exchange([took]).wait()))
    finally:
        torch.set_num_threads(own)
    return alone / together


def _waited(session: Session) -> bool:
    """Waits until two cores are worth two. Returns False if they were not at once."""
    for count in range(MOST_WAITS):
        if session.control.broadcast_object(worth_of_two(session)) >= LEAST_WORTH:
            return not count
        time.sleep(WAIT_SECONDS)
    return False


def _steady_step(task: Any, case: Case, session: Session) -> float:
    """The median seconds of a step while two cores are worth two, if there is such a time."""
    _waited(session)
    for _ in range(MOST_REPEATS):
        found = _median_step(task, case, session)
        if _waited(session):
            break
    return found


def _median_step(task: Any, case: Case, session: Session) -> float:
    warm = LEARNING_STEPS if case.balance == "auto" else WARM_STEPS
    with Engine(task, case.config(), session=session) as engine, closing(engine.batches()) as batches:
        for _ in range(warm):
            began = time.perf_counter()
            engine.step(next(batches))
        once = time.perf_counter() - began
        count = math.ceil(max(SECONDS[0] / once, min(STEPS, SECONDS[1] / once)))
        taken, last = list[float](), time.perf_counter()
        for _ in range(session.control.broadcast_object(count)):
            engine.step(next(batches))
            now = time.perf_counter()
            taken.append(now - last)
            last = now
        return statistics.median(taken)


def measured(task: Any, cases: Sequence[Case]) -> dict[Case, float | None]:
    """The seconds of a step in each case."""
    found: dict[Case, float | None] = {}
    for ranks in NUMBERS:
        own = [case for case in cases if case.candidate.ranks == ranks]
        own.sort(key=lambda case: case.batch_size)  # memory that larger ones freed makes smaller ones faster
        took = launch(steps_on_rank, task, own, processes=ranks, device="cpu")[0]
        found |= zip(own, took, strict=True)
    return found


def compared(name: str, seconds: float) -> list[Row]:
    """The rows of a task."""
    task, batch_size = task_named(name), TASKS[name]
    cases = list(cases_of([way for ranks in NUMBERS for way in candidates_for(ranks)], batch_size))
    before = measured(task, cases)
    calibration = calibrate(task, RunConfig(device="cpu", batch_size=batch_size), NUMBERS, seconds=seconds)
    cases = [case for case in cases if before[case] is not None and way_of(case) in calibration.costs]
    after = measured(task, cases)
    rows = []
    for case in cases:
        step = prediction(calibration, case)
        interval = step.quantile(0.05), step.quantile(0.95)
        took = [each for each in (before[case], after[case]) if each is not None]
        rows.append(Row(name, case.kind, case.words, case.batch_size, step.seconds, *interval, tuple(took)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line for each case."""
    lines = [
        "| task | what | way | batch | predicted | 90 % interval | measured | error | repeats |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        interval = f"{row.low * 1e3:.1f} to {row.high * 1e3:.1f}"
        cells = [row.task, row.kind, f"`{row.words}`", str(row.batch_size), f"{row.predicted * 1e3:.1f} ms"]
        cells += [interval, f"{row.seconds * 1e3:.1f} ms", f"{row.error:+.1%}", f"{row.repeat_spread:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show_summary(rows: Sequence[Row]) -> None:
    """Errors by kind and by task, and the regret of the plans' first ways."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    seen = {task: [row for row in rows if row.task == task and row.kind == "seen"] for task in tasks}
    drifts = {task: statistics.median(row.error for row in seen[task]) for task in tasks}
    groups = {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    groups["all unseen"] = [row for row in rows if row.kind != "seen"]
    made = list[list[Value]]()
    for name, group in groups.items():
        steady = [abs((1 + row.error) / (1 + drifts[row.task]) - 1) for row in group]
        held, repeats = _held_and_repeats(group)
        made.append([name, cell(len(group)), *_three(_errors(group)), *_three(steady), held, repeats])
    columns = ["what", "cases", "median error", "mean", "p95", "without drift: median", "mean", "p95"]
    record("plan", "errors by kind", Table([*columns, *HELD], made))
    made = list[list[Value]]()
    regrets = {}
    for task in tasks:
        group = [row for row in rows if row.task == task and row.kind != "seen"]
        first = min(seen[task], key=lambda row: row.predicted)
        regrets[task] = first.seconds / min(row.seconds for row in seen[task]) - 1
        others = [*_held_and_repeats(group), _percent(drifts[task]), _percent(regrets[task])]
        made.append([f"{task} ({len(group)})", *_three(_errors(group)), *others])
    found = list(regrets.values())
    for name, regret in (("mean of the tasks", statistics.mean(found)), ("p95 of the tasks", _p95(found))):
        made.append([name, *[None] * 6, _percent(regret)])
    columns = ["unseen cases of", "median error", "mean", "p95", *HELD, "drift", "regret"]
    record("plan", "errors by task", Table(columns, made))


def _held_and_repeats(group: Sequence[Row]) -> list[Cell]:
    held = statistics.mean(row.is_held for row in group)
    return [_percent(held), _percent(statistics.median(row.repeat_spread for row in group))]


def _errors(group: Sequence[Row]) -> list[float]:
    return [abs(row.error) for row in group]


def _percent(part: float) -> Cell:
    return cell(100 * part, "%")


def _three(errors: Sequence[float]) -> list[Cell]:
    return [_percent(each) for each in (statistics.median(errors), statistics.mean(errors), _p95(errors))]


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def memory_on_rank(task: Any, config: RunConfig) -> tuple[tuple[int, ...], int]:
    """Peak bytes of all ranks in a few steps, and how often they ran out and tried with smaller pieces."""
    peaks, retries = list[tuple[int, ...]](), 0
    with (
        Session(device="cpu", timeout_seconds=TIMEOUT_SECONDS) as session,
        quiet(),
        Engine(task(), config, session=session) as engine,
        closing(engine.batches()) as batches,
    ):
        for _ in range(WARM_STEPS):
            step = engine.step(next(batches))
            peaks.append(step.record().memory_peak)
            retries += sum(map(int, step.retries))
    return tuple(map(max, zip(*peaks, strict=True))), retries


def memory_rows(names: Sequence[str]) -> Iterator[list[Value]]:
    """For each case the bytes of the rank that needs the most, and what it took."""
    for name in names:
        task, size = task_named(name), TASKS[name]
        ways = [Candidate(1, "single"), Candidate(2, "ddp"), Candidate(2, "sharded", ("zero=2",))]
        cases = [Case("memory", way, 2 * size) for way in [*ways, Candidate(3, "sharded", ("zero=3",))]]
        for case in cases:
            estimate = estimate_memory(task, case.config())
            said = [rank.needed for rank in estimate.ranks]
            limits = ",".join(str(math.ceil(needed / (1 - HEADROOM))) for needed in said)
            alone = max(rank.needed - rank.shared for rank in estimate.ranks)
            settings, took = case.config().replace(memory_limit=limits), None
            try:
                ranks = launch(memory_on_rank, task, settings, processes=case.candidate.ranks, device="cpu")
            except (EvenerError, torch.OutOfMemoryError) as error:
                why = str(error)
            else:
                peak, why = max(ranks[0][0]), f"{ranks[0][1]} times" if ranks[0][1] else "no"
                took = cell(peak / 2**20, "MiB", predicted=alone / 2**20)
            yield [f"{name}, `{case.words}`", str(case.batch_size), took, why]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tasks", type=lambda text: text.split(";"), default=list(TASKS), metavar="NAME;NAME"
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="for the trials of each task")
    parser.add_argument("--only", default="time,memory")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="join files of --json")
    given: Any = parser.parse_args(arguments)
    rows = list[Row]()
    if given.summary:
        found = [json.loads(path.read_text()) for path in given.summary]
        rows = [Row(**row | {"measured": tuple(row["measured"])}) for each in found for row in each]
    elif "time" in given.only:
        for name in given.tasks:
            rows += compared(name, given.seconds)
            if given.json:
                given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if rows:
        print(table(rows), flush=True)
        show_summary(rows)
    if "memory" in given.only and not given.summary:
        columns = ["task, way", "batch", "took [predicted]", "ran out"]
        record("plan", "memory", Table(columns, memory_rows(given.tasks)))


if __name__ == "__main__":
    main()
