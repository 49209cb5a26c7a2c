"""Reports of runs that nobody has trained, with every part that a report can have."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from evener.tools.report import schema
from evener.tools.report.schema import (
    Attempt,
    Cause,
    Collective,
    Columns,
    EvaluationPoint,
    Goodput,
    MemoryOfRank,
    Merges,
    PredictedTerm,
    Prediction,
    RankTotals,
    Report,
    RunEvent,
    RunIdentity,
    Series,
    Span,
    TimelineStep,
    Verdict,
)

UNITS = {
    schema.THROUGHPUT: "samples/s",
    schema.SHARE: "1",
    schema.MEMORY: "B",
    schema.LOSS: "",
    schema.LR: "",
}
OF_RANKS = (
    schema.SHARE,
    schema.COMPUTE,
    schema.FORWARD,
    schema.BACKWARD,
    schema.WAITING,
    schema.COMMUNICATION,
    schema.INPUT,
    schema.MEMORY,
)


def series(
    name: str,
    columns: int,
    value: Callable[[int], float | None],
    spread: float = 0.2,
    rank: int | None = None,
) -> Series:
    """A series whose columns reach up to ``spread`` around ``value``, with noise that is the same each time."""
    noise = random.Random(f"{name} {rank}")
    mean = [
        each and each * noise.uniform(1 - spread / 4, 1 + spread / 4) for each in map(value, range(columns))
    ]
    low, high = (
        tuple(each and each * noise.uniform(1, 1 + sign * spread) for each in mean) for sign in (-0.7, 1)
    )
    return Series(name, UNITS.get(name, "s"), low, tuple(mean), high, rank)


def report(
    steps: int = 1000, ranks: int = 4, columns: int = 240, own_series: int = 8, name: str = "runs<first>"
) -> Report:
    """A run on unequal ranks, of which rank 2 is the slowest."""
    columns = min(columns, steps)
    edges = [column * steps // columns for column in range(columns + 1)]
    devices = tuple(f"cpu {rank % 2}" for rank in range(ranks))
    slowness = [1.0 + (rank == 2) + rank % 3 / 10 for rank in range(ranks)]
    found = [
        series(
            schema.LOSS, columns, lambda at: 2.3 * math.exp(-3 * at / columns) + 0.1 * math.sin(at) ** 2, 0.1
        ),
        series(schema.LR, columns, lambda at: 0.1 * (1 - at / columns), 0.0),
        series(schema.THROUGHPUT, columns, lambda at: 1800 + 50 * math.sin(at / 9)),
        series(schema.STEP_SECONDS, columns, lambda at: 0.035 + 0.001 * math.sin(at / 9)),
    ]
    for number, quantity in enumerate(OF_RANKS, 1):
        scale = 5e7 if quantity == schema.MEMORY else 1 / ranks if quantity == schema.SHARE else 0.02 / number
        of_rank = [
            series(quantity, columns, lambda at, s=scale * slow: s * (1 + 0.1 * math.sin(at / 7)), rank=rank)
            for rank, slow in enumerate(slowness[:own_series])
        ]
        found += [series(quantity, columns, lambda at, s=scale: s, 0.8), *of_rank]
    totals = tuple(
        RankTotals(
            rank,
            devices[rank],
            1 / ranks,
            20 * slow,
            9.0 / slow,
            2.0,
            1.5,
            8 * slow,
            10 * slow,
            1e-3 * slow,
            1,
            0,
        )
        for rank, slow in enumerate(slowness)
    )
    parts = {"parameters": 20 << 20, "gradients": 20 << 20, "optimizer": 40 << 20, "activations": 90 << 20}
    spans = tuple(
        Span(rank, part, begin, seconds)
        for rank in range(ranks)
        for part, begin, seconds in (
            ("input", 0.0, 0.002),
            ("forward", 0.002, 0.01),
            ("backward", 0.012, 0.02 + 0.003 * (rank == 2)),
            ("waiting", 0.032 + 0.003 * (rank == 2), 0.003),
        )
    )
    return Report(
        RunIdentity(
            name,
            "digits",
            "ddp",
            ranks,
            devices,
            schema.FINISHED,
            steps,
            64 * steps,
            35.2,
            batch_size=64,
            total_steps=steps,
            epochs=3,
            allreduce="ring",
            settings={"batch_size": 64, "lr": 0.1, "nested": {"a": [1, None]}, "balance": "off"},
            versions={"evener": "0.1.0", "torch": "2.13.0"},
            started="2026-11-26T03:00:00Z",
            command="evener train digits --processes 4 --throttle 1,0.5,0.25,1",
            weights_digest="ab" * 32,
            notes=("compiled: 2 graphs", "precision bf16"),
        ),
        Verdict(
            "Rank 2 takes 2.1x as long for a sample; all ranks wait for samples. "
            "57% of the time is compute, 21% waits for rank 2.",
            False,
            (
                Cause(
                    "slow forward",
                    "Rank 2 takes 2.1x as long for a sample.",
                    2,
                    7.4,
                    0.21,
                    "--balance auto",
                    1.18,
                ),
                Cause(
                    "slow loader",
                    "9% of the time all ranks wait for samples.",
                    None,
                    3.2,
                    0.09,
                    "--workers 2",
                ),
            ),
        ),
        Goodput(1.5, 20.0, 3.0, 7.4, 3.2, 0.4, 2, 0.9, 0.0, 0.3),
        Columns(tuple(edges[:-1]), tuple(edge - 1 for edge in edges[1:])),
        tuple(found),
        totals,
        tuple(
            EvaluationPoint(steps * at // 3, at, {"loss": 1.0 / at, "accuracy": 0.5 + at / 10}, 360, 0.3)
            for at in (1, 2, 3)
        ),
        tuple(MemoryOfRank(rank, 180 << 20, 256 << 20, parts, 12.5) for rank in range(ranks)),
        (
            Collective("all_reduce", "ring", 25 << 20, 2.0, 0.003),
            Collective("all_gather", "", 4096, 1.0, 0.0001),
        ),
        (TimelineStep(steps // 2, 0.035, "typical", spans), TimelineStep(steps - 1, 0.038, "last", spans)),
        (
            RunEvent(
                steps // 4, "shares", "new shares", None, (0.3, 0.3, 0.1, 0.3), "rank 2 takes twice as long"
            ),
            RunEvent(steps // 2, "restart", "rank 1 was replaced", 1),
        ),
        (Attempt(0, ranks), Attempt(steps // 2, ranks, "2026-11-26T03:10:00Z", 0.9, 12, 0.4, "rank 1 died")),
        Prediction(
            "a step took 35 ms",
            0.03,
            0.04,
            (PredictedTerm("compute", 0.02, 0.022), PredictedTerm("step", 0.034, 0.035)),
        ),
        Merges(
            ("every 10 steps",),
            100,
            1 << 20,
            3,
            {"0": 80, "1": 20},
            series("spread", columns, lambda at: 0.5),
        ),
        1810.0,
    )
