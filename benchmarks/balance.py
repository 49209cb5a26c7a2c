"""What shares by speed bring on unequal ranks, against equal shares in plain DDP, Accelerate, Fabric and Evener itself.

    python -m benchmarks.balance [--turns 10] [--steps 10] [--only cores,emulated,slowdown,steady,overhead]

=========  ===========================================================================================================
cores      three ranks on two cores, one alone and two sharing, by processor affinity: really unequal
emulated   two ranks, of which one sleeps in proportion to its own work before its last gradient is handed over, in
           all contenders alike
slowdown   one rank becomes twice as slow in mid-run, and recovers
steady     equal ranks on a noisy machine: what it costs to look for something to gain
overhead   the balancer's own time in a step
=========  ===========================================================================================================

"optimum" are fixed shares: the exact solution for each rank's own curve of time, measured with several shares; of
emulated ranks for the curve of one that is not slowed down, and its multiple.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import ABSENT, PEERS, Contender, Work, ours
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, ratio, take_turns
from benchmarks.results import Table, Value, cell, record, spread
from evener.balance import BySpeed, solve
from evener.balance.base import Balancer
from evener.balance.time_model import Line
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.distributed.session import Session
from evener.training.engine import Engine

BATCH_SIZE = 192
WARM_UP = 40
"""Steps before anything is measured, in which shares find their place."""
SWEEP_STEPS = 30
"""Steps with each of the shares from which curves are measured."""


def model() -> nn.Module:
    """Much work and few weights, so that the exchange is short."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def work(name: str, build: Callable[[], nn.Module] = model) -> Work:
    data = TensorDataset(rand(BATCH_SIZE * 20, 3, 16, 16), randint(10, (BATCH_SIZE * 20,)))
    return Work(name, build, data, BATCH_SIZE)


# Unequal ranks


def pin(rank: int) -> None:
    """Rank 0 has a core for itself, all others share the next one."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[min(rank, 1)]})


def throttled(factor: float) -> Callable[[], nn.Module]:
    """The model of a rank at ``factor`` of its speed: it sleeps just before its last gradient is handed over."""

    def build() -> nn.Module:
        built = model()
        waiting: set[Any] = set()
        began = 0.0

        def begin(*_: Any) -> None:
            nonlocal began
            waiting.update(built.parameters())
            began = time.perf_counter()

        def arrived(parameter: Any) -> None:
            waiting.discard(parameter)
            if not waiting:
                time.sleep((time.perf_counter() - began) * (1 / factor - 1))

        built.register_forward_pre_hook(begin)
        for parameter in built.parameters():
            parameter.register_post_accumulate_grad_hook(arrived)
        return built

    return build


# The optimum


class Seen(Observer):
    """Keeps the record of every step, on all ranks."""

    everywhere = True

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)


def train(work: Work, session: Session, steps: int, **settings: Any) -> tuple[list[StepRecord], Balancer]:
    """The steps of a run of Evener."""
    seen = Seen()
    task = evener.Task(
        model=work.model, loss=nn.CrossEntropyLoss(), optimizer=work.optimizer, train=work.data
    )
    config = RunConfig(batch_size=work.batch_size, steps=steps, **settings)
    with Engine(task, config, session=session, observers=[seen]) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.balancer is not None
        return seen.steps, engine.balancer


def optimum(work: Work, session: Session, **settings: Any) -> list[int]:
    """The best shares, by each rank's own curve around them: ranks that share a core slow each other down."""
    shares = [work.batch_size // session.world_size] * session.world_size
    for _ in range(2):
        shares = solve(curves(work, session, shares, **settings), work.batch_size)
    return shares


def curves(work: Work, session: Session, base: Sequence[int], **settings: Any) -> list[Line]:
    """Each rank's time as a line through what it takes for ``base`` and for shares of which one is quite another."""
    points: list[list[tuple[int, float]]] = [[] for _ in base]
    others = [(rank, factor) for rank in range(len(base)) for factor in (0.5, 1.7)]
    for changed, factor in [(-1, 1.0), *others]:
        weights = ",".join(str(n * (factor if rank == changed else 1.0)) for rank, n in enumerate(base))
        steps, _ = train(work, session, SWEEP_STEPS, balance=weights, **settings)
        for rank, seen in enumerate(points):
            seconds = [step.compute_seconds[rank] for step in steps[5:]]
            # The lower quartile: a disturbance makes a step longer, nothing makes it shorter.
            seen.append((steps[-1].shares[rank], statistics.quantiles(seconds, n=4)[0]))
    fits = [np.polyfit(*zip(*seen, strict=True), 1) for seen in points]
    return [Line(max(0.0, float(offset)), max(1e-9, float(slope))) for slope, offset in fits]


def emulated_optimum(times: int, session: Session) -> list[int]:
    """The best shares of a rank and one ``times`` slower, by the curve of the less disturbed of two equal ranks."""
    equal = [BATCH_SIZE // 2] * 2
    line = min(curves(work("equal ranks"), session, equal), key=lambda line: line(BATCH_SIZE // 2))
    slower = Line(line.overhead_seconds * times, line.seconds_per_sample * times)
    return solve([line, slower], BATCH_SIZE)


def compare(work: Work, session: Session, turns: int, steps: int, shares: Sequence[int]) -> dict[str, Timing]:
    """All contenders in turns; the optimum has fixed ``shares``."""
    best = ",".join(map(str, shares))
    contenders: dict[str, Contender] = {
        **PEERS,
        "Evener equal": ours(balance="equal"),
        "Evener auto": ours(balance="auto"),
        "optimum": ours(balance=best),
    }
    found = take_turns(contenders, work, session, turns, steps, WARM_UP)
    return {f"optimum ({best})" if name == "optimum" else name: timing for name, timing in found.items()}


# What is shown


def cores(turns: int, steps: int) -> dict[str, Timing]:
    """One rank alone on a core, two that share one."""
    pin(int(os.environ["RANK"]))
    with Session(device="cpu") as session:
        here = work("three ranks on two cores")
        return compare(here, session, turns, steps, optimum(here, session))


def emulated(turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    """2:1, 3:1 and 4:1."""
    results = {}
    with Session(device="cpu") as session:
        for times in (2, 3, 4):
            build = model if session.rank == 0 else throttled(1 / times)
            name = f"two ranks, one {times} times slower"
            shares = emulated_optimum(times, session)
            results[name] = compare(work(name, build), session, turns, steps, shares)
    return results


def slowdown() -> dict[str, float]:
    """Step time with auto from 20 steps after each change on, over that of the optimum there, in turns of 5 steps."""
    phases, together, later = 60, 5, 20
    changes = (f"{phases}:1:0.5", f"{2 * phases}:1:1")
    with Session(device="cpu") as session:
        here = work("slowdown")
        slow = ",".join(map(str, optimum(here, session, throttle="1,0.5")))
        contenders = {
            "auto": ours(balance="auto", throttle_at=changes),
            "slowed": ours(balance=slow, throttle="1,0.5"),
            "equal": ours(balance="equal"),
        }
        found = take_turns(contenders, here, session, 3 * phases // together, together, warm_up=0)
        taken, balancer = train(here, session, 3 * phases, balance="auto", throttle_at=changes)

    def over(best: str, phase: int) -> float:
        turns = slice((phase * phases + later) // together, (phase + 1) * phases // together)
        auto, other = (Timing(found[name].turns[turns]) for name in ("auto", best))
        return ratio(auto, other)

    reached = (step.step - phases for step in taken[phases:] if step.shares[0] > BATCH_SIZE * 0.6)
    return {
        "slowed, over the optimum": over("slowed", 1),
        "recovered, over equal shares": over("equal", 2),
        "changes": float(len(balancer.decisions)),
        "steps until the faster rank had 60 %": float(next(reached, -1)),
    }


def steady(turns: int, steps: int) -> dict[str, float]:
    """500 steps of equal ranks, and auto against equal in turns."""
    with Session(device="cpu") as session:
        here = work("steady")
        contenders = {"equal": ours(balance="equal"), "auto": ours(balance="auto")}
        found = take_turns(contenders, here, session, turns, steps, WARM_UP)
        _, balancer = train(here, session, 500, balance="auto")
        return {
            "changes in 500 steps": float(len(balancer.decisions)),
            "auto over equal": ratio(found["auto"], found["equal"]),
        }


def overhead(world_size: int = 2, steps: int = 2000) -> float:
    """Seconds of the processor that ``BySpeed`` takes in a step."""
    balancer, noise = BySpeed(world_size), np.random.default_rng(0).lognormal(0, 0.05, (steps, world_size))
    began = time.process_time()
    for step in range(steps):
        shares = balancer.shares(step, BATCH_SIZE)
        balancer.observe(step, shares, [1e-3 * n * x for n, x in zip(shares, noise[step], strict=True)])
    return (time.process_time() - began) / steps


def _speeds(results: Mapping[str, Mapping[str, Timing]]) -> Table:
    """How fast all contenders are, and Evener with shares by speed beside the optimum."""
    contenders = [*PEERS, "Evener equal", "Evener auto", "optimum"]
    columns = ["ranks", *contenders, "auto over the optimum", "shares of the optimum"]
    rows = [_row(name, timings) for name, timings in results.items()]
    return Table(columns, rows, "times as fast as plain DDP")


def _row(name: str, timings: Mapping[str, Timing]) -> list[Value]:
    plain, cells = timings["plain DDP"], []
    for timing in timings.values():
        times = [a / b for a, b in zip(plain.turns, timing.turns, strict=True)]
        cells.append(
            cell(1e3 * timing.median, "ms", ratio=statistics.median(times), spread=spread(times) or None)
        )
    best = next(contender for contender in timings if contender.startswith("optimum"))
    over = ratio(timings[best], timings["Evener auto"])
    return [name, *cells, cell(over, "x"), best.removeprefix("optimum ").strip("()")]


def _numbers(found: Mapping[str, float]) -> Table:
    return Table(["what", "seen"], [[what, cell(value)] for what, value in found.items()])


def _launched(function: Callable[..., Any], *args: int, processes: int = 2) -> Any:
    return evener.launch(function, *args, processes=processes, device="cpu")[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="cores,emulated,slowdown,steady,overhead")
    arguments = parser.parse_args()
    turns, steps, chosen = arguments.turns, arguments.steps, arguments.only.split(",")
    if ABSENT:
        print(f"not installed: {', '.join(ABSENT)}", flush=True)
    if "cores" in chosen:
        found = {"three ranks on two cores": _launched(cores, turns, steps, processes=3)}
        record("balance", "really unequal ranks", _speeds(found))
    if "emulated" in chosen:
        record("balance", "slower ranks sleep", _speeds(_launched(emulated, turns, steps)))
    if "slowdown" in chosen:
        record("balance", "a slowdown in mid-run", _numbers(_launched(slowdown)))
    if "steady" in chosen:
        record("balance", "equal ranks", _numbers(_launched(steady, turns, steps)))
    if "overhead" in chosen:
        found = [[f"{ranks} ranks", cell(1e6 * overhead(ranks), "us")] for ranks in (2, 16)]
        record("balance", "the balancer's own time", Table(["", "a step, of the processor"], found))


if __name__ == "__main__":
    main()
