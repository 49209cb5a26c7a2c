"""What sums cost that have the same bits on any division (`--exact bits`), beside plain sums of the same gradients.

A step's gradients come in blocks. Plain sums add them in float32 in place, as autograd does, and sum that over the
ranks; exact ones round each block to the grid, add it in float64, and sum float64 over the ranks. One and two CPU
ranks, one thread each, in turns; the all-reduce is the default. Told is the thread's CPU time, which other programs
disturb less. `benchmarks.bits_grains` says what grains cost.

python -m benchmarks.bits [--turns 15] [--blocks 4]
python -m benchmarks.bits --audit 0.01 [--turns 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.bits_grains import SAMPLES, networks
from benchmarks.drawn import randn
from benchmarks.results import Table, Value, cell, record, spread
from evener.collectives.base import AllReduce
from evener.collectives.registry import make
from evener.components.exact_sum.gradients import ExactGradients
from evener.core.config.exact_bits import ExactBits
from evener.core.task.task import Task
from evener.data.batch import Batch
from evener.torch_internals.foreach import add_each, copy_each
from evener.training.engine import Engine

SIZES = (50_000, 500_000, 5_000_000)
STEP_SECONDS = 0.020
"""A step beside which the cost is told."""
LAYERS = 8
STEPS = 150
"""Steps of a turn of which some have audits."""

Blocks = list[dict[str, Tensor]]


def drawn(size: int, blocks: int) -> Blocks:
    """Gradients of layers with a matrix and a vector each. Those of all blocks lie in the same memory: in a run
    those of a block are freed before the next one's are made."""
    rows = int((size / LAYERS) ** 0.5)
    shapes = {f"{layer}.weight": (rows, rows) for layer in range(LAYERS)}
    shapes |= {f"{layer}.bias": (rows,) for layer in range(LAYERS)}
    return [{name: randn(*shape) for name, shape in shapes.items()}] * blocks


Act = Callable[[], object]


def plain(blocks: Blocks, all_reduce: AllReduce | None) -> tuple[Act, Act]:
    sums = [gradient.clone() for gradient in blocks[0].values()]
    flat = torch.cat([gradient.reshape(-1) for gradient in sums])

    def step() -> None:
        for block in blocks[1:]:
            add_each(sums, list(block.values()))
        if all_reduce is not None:
            all_reduce(flat, lasting=True).wait()

    return lambda: None, step


def exact(blocks: Blocks, all_reduce: AllReduce | None) -> tuple[Act, Act]:
    """Returns what makes the gradients of the last block, in whose place come the sums, and what adds up."""
    names, own = list(blocks[0]), ExactGradients(blocks[0], torch.device("cpu"))
    results = {name: gradient.clone() for name, gradient in blocks[0].items()}

    def step() -> None:
        own.forget()
        for block in blocks[1:]:
            own.add(block)
        if all_reduce is None:
            for name, total in own.of_one_rank(results).items():
                results[name].copy_(total)
        else:
            flat = own.packed(names, results)
            all_reduce(flat, lasting=True).wait()
            own.unpack(flat, results)
            for name, total in own.finish(lambda limbs: all_reduce(limbs).wait()).items():
                results[name].copy_(total)
        own.commit()

    return lambda: copy_each(list(results.values()), list(blocks[0].values())), step


def measure(turns: int, number: int) -> list[tuple[int, float, float]]:
    """Returns for each size the medians of both, in seconds."""
    torch.set_num_threads(1)
    with evener.Session(device="cpu") as session:
        all_reduce = make() if session.world_size > 1 else None
        found = [(size, *_medians(drawn(size, number), all_reduce, turns)) for size in SIZES]
        if all_reduce is not None:
            all_reduce.close()
    return found


def _medians(blocks: Blocks, all_reduce: AllReduce | None, turns: int) -> tuple[float, float]:
    steps = [make_step(blocks, all_reduce) for make_step in (plain, exact)]
    times: list[list[float]] = [[], []]
    for turn in range(turns + 5):
        for own, (renew, step) in zip(times, steps, strict=True):
            renew()
            began = time.thread_time()
            step()
            if turn >= 5:
                own.append(time.thread_time() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--audit", type=float, default=0.0, help="measure this in place of the sums")
    given = parser.parse_args()
    if given.audit:
        columns = [
            "network (parameters)",
            "a step without audits",
            "more with one",
            "blocks that are audited",
        ]
        found = evener.launch(audited, given.turns, given.audit, processes=2, device="cpu")[0]
        record(
            "bits", "steps of two ranks", Table(columns, found, "time of all steps over those without audits")
        )
        return
    columns = ["ranks, parameters", "plain", "exact", "more, of a step of 20 ms"]
    title = f"sums of {given.blocks} block{'s' * (given.blocks > 1)} a rank"
    record("bits", title, Table(columns, rows(given.turns, given.blocks)))


def audited(turns: int, audit: float) -> list[list[Value]]:
    """Returns a row for each network: steps of 16 blocks on two ranks, and what audits add to them.

    Few steps have audits, and times differ more from minute to minute than an audit costs. So each audited step is
    compared with the closest steps without one before and after it.
    """
    found = list[list[Value]]()
    with evener.Session(device="cpu") as session:
        for network in (networks()[0], networks()[2]):
            samples = TensorDataset(network.inputs.repeat_interleave(16, 0), network.targets.repeat(16))
            task = Task(
                model=network.model,
                loss=nn.CrossEntropyLoss(),
                optimizer=partial(torch.optim.SGD, lr=1e-3),
                train=samples,
                batch_size=SAMPLES,
            )
            settings: dict[str, Any] = {"exact": "bits", "balance": "equal", "epochs": 10**6}
            with Engine(task, session=session, audit=audit, **settings) as engine:
                blocks = ExactBits.chosen(SAMPLES).blocks(SAMPLES)
                feed = engine.batches()
                each = [_turn(engine, feed, audit, blocks) for _ in range(turns + 1)][1:]
            size = sum(parameter.numel() for parameter in engine.model.parameters())
            usual, more, ratios = (list(column) for column in zip(*each, strict=True))
            about = {"ratio": statistics.median(ratios), "spread": spread(ratios)}
            times = [cell(1e3 * statistics.median(column), "ms") for column in (usual, more)]
            found.append([f"{network.name} ({size / 1e3:,.0f} k)", *times, cell(100 * audit, "%", **about)])
    return found


def _turn(engine: Engine, feed: Iterator[Batch], audit: float, blocks: int) -> tuple[float, float, float]:
    """Returns the seconds of a step without audits, those that audits add to a step that has some, and the time of all
    steps over that without audits, if the part of the blocks that is audited is as it was asked for."""
    seconds, parts = list[float](), list[float]()
    for batch in islice(feed, STEPS):
        began = time.perf_counter()
        engine.step(batch)
        seconds.append(time.perf_counter() - began)
        parts.append(len(batch.audited) / blocks)
    beside = [at for at, part in enumerate(parts) if not part]
    audits = [at for at, part in enumerate(parts) if part and beside[0] < at < beside[-1]]
    found = list[float]()
    for at in audits:
        after = bisect(beside, at)
        found.append(seconds[at] - sum(seconds[beside[place]] for place in (after - 1, after)) / 2)
    usual, more = statistics.median(seconds[at] for at in beside), statistics.median(found)
    return usual, more, 1 + more * audit / statistics.mean(parts[at] for at in audits) / usual


def rows(turns: int, blocks: int) -> Iterator[list[Value]]:
    for ranks in (1, 2):
        for size, usual, own in evener.launch(measure, turns, blocks, processes=ranks, device="cpu")[0]:
            times = [cell(1e3 * seconds, "ms") for seconds in (usual, own)]
            label = f"{ranks} rank{'s' * (ranks > 1)}, {size:,}"
            yield [label, *times, cell(100 * (own - usual) / STEP_SECONDS, "%")]


if __name__ == "__main__":
    main()
