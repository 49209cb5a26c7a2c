"""What each step takes of a rank's memory, by what it is for, and what that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from evener.core.records import StepRecord
from evener.hardware.gpu_tenants import CardUse
from evener.hardware.memory import CATEGORIES
from evener.hardware.memory.step_usage import Lap, MemoryUse, News
from evener.hardware.survey.facts import Tenant
from evener.strategies.memory_monitor import LOOK_SECONDS, Read
from tests.observers import Remembering
from tests.ranks import RankPool
from tests.tasks import draws

WIDTH, SAMPLES, MIB, GIB = 512, 64, 2**20, 2**30
NBYTES = 4 * (WIDTH * WIDTH + WIDTH)


def task(optimizer: Any = None) -> evener.Task:
    """One linear layer of 1 MiB, whose activations are small beside it."""
    return evener.Task(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        loss=nn.MSELoss(),
        optimizer=optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        train=TensorDataset(draws(SAMPLES, WIDTH), draws(SAMPLES, WIDTH, seed=2)),
        batch_size=16,
        epochs=2,
    )


def records_of(**settings: Any) -> list[StepRecord]:
    told = Remembering()
    options: dict[str, Any] = {"device": "cpu"} | settings
    with evener.Engine(task(), observers=[told], **options) as engine:
        for batch in engine.batches():
            engine.step(batch)
    return told.steps


def test_what_a_rank_holds_is_known_by_its_size() -> None:
    records = records_of(strategy="single")
    assert len(records) == 8
    for record in records:
        parts = {name: column[0] for name, column in record.memory_parts.items()}
        assert sum(parts.values()) == record.memory_peak[0]
        assert (parts["parameters"], parts["gradients"]) == (NBYTES, NBYTES)
        assert parts.get("optimizer", 0) == (NBYTES if record.step else 0), "made by the first update"
        assert parts["inputs"] == 2 * 16 * WIDTH * 4
        assert parts["other"] > 20 * MIB, "Python and PyTorch"


def test_what_is_counted_is_told_by_category() -> None:
    records = records_of(strategy="single", memory_limit="1GiB")
    parts = {name: column[0] for name, column in records[-1].memory_parts.items()}
    assert sum(parts.values()) == records[-1].memory_peak[0]
    assert {parts[name] for name in ("parameters", "optimizer")} == {NBYTES}
    assert records[-1].memory_held[0] < 4 * MIB, "nothing of the process itself"


def divided(strategy: str) -> list[StepRecord]:
    return records_of(strategy=strategy, allreduce="shared-memory" if strategy == "ddp" else None)


def test_ranks_tell_each_other_what_they_hold(ranks: Callable[[int], RankPool]) -> None:
    records, _ = ranks(2).run(divided, "ddp")
    parts = records[-1].memory_parts
    assert parts["parameters"] == parts["gradients"] == parts["optimizer"] == (NBYTES, NBYTES)
    assert min(parts["buckets"]) >= MIB, "shared memory of all ranks"


def test_what_is_divided_is_told_divided(ranks: Callable[[int], RankPool]) -> None:
    records, _ = ranks(2).run(divided, "sharded")
    parts = records[-1].memory_parts
    assert sum(parts["optimizer"]) == NBYTES
    assert min(parts["optimizer"]) > 0.4 * NBYTES
    assert min(parts["buckets"]) > 0


# A card that is made up


class Card:
    """Gives the laps that a test wants; what is cached can be given back."""

    every_seconds = 0.0

    def __init__(self) -> None:
        self.held, self.reserved, self.split, self.retries, self.failures = 2 * GIB, 3 * GIB, 0, 0, 0
        self.emptied = 0

    def lap(self) -> Lap:
        return Lap(self.held, self.held, self.reserved, self.split, self.retries, self.failures)

    def kept(self) -> int:
        return 0

    def empty(self) -> None:
        self.emptied += 1
        self.reserved = self.held + self.split


class Others:
    """Another process, which has some of the card."""

    def __init__(self, *tenants: Tenant, free: int = 20 * GIB) -> None:
        self.use, self.asked = CardUse(free, 24 * GIB, tenants), 0

    def read_usage(self) -> CardUse:
        self.asked += 1
        return self.use


@pytest.fixture
def engine() -> Iterator[evener.Engine]:
    with evener.Engine(task(), device="cpu", strategy="single") as made:
        yield made


def after(watch: Read) -> News:
    """What is new with a step."""
    batch: Any = SimpleNamespace(micro_batches=[])
    watch.begin(batch)
    return watch.end(batch).news


def test_pieces_are_told_once(engine: evener.Engine) -> None:
    card = Card()
    watch = Read(engine.learner, card)
    assert after(watch) == News()
    card.split, card.failures = GIB, 1
    assert after(watch) == News(lost=GIB)
    card.failures, card.retries = 2, 3
    assert after(watch) == News(retries=3)
    card.failures, card.retries = 3, 4
    assert after(watch) == News()
    assert card.emptied == 0, "nothing of it could be given back"


def test_a_cache_is_emptied_when_memory_ran_out_and_told_by_what_that_won(engine: evener.Engine) -> None:
    card = Card()
    watch = Read(engine.learner, card)
    watch.relieve(2 * GIB)
    assert (card.emptied, after(watch)) == (0, News()), "it has less than was asked for"
    watch.relieve(GIB // 2)
    assert (card.emptied, after(watch)) == (1, News(won=GIB))
    assert after(watch) == News()


def test_other_processes_are_asked_for_now_and_then(engine: evener.Engine) -> None:
    card, others, now = Card(), Others(Tenant(1, GIB), Tenant(4711, 3 * GIB)), [0.0]
    watch = Read(engine.learner, card, others, clock=lambda: now[0])  # type: ignore[arg-type]
    assert after(watch) == News(others=4 * GIB, pid=4711, free=20 * GIB)
    assert after(watch) == News()
    assert others.asked == 1
    now[0] += LOOK_SECONDS
    assert after(watch) == News(), "it is the same one"
    assert (others.asked, card.emptied) == (2, 0)
    others.use = CardUse(GIB // 10, 24 * GIB, (Tenant(4712, 20 * GIB),))
    now[0] += LOOK_SECONDS
    assert after(watch) == News(won=GIB, others=20 * GIB, pid=4712, free=GIB // 10)
    assert card.emptied == 1


class Process(Card):
    """Dear to read; the most since the last reading is what a test says."""

    every_seconds = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.laps, self.reserved = 2 * GIB, 0, 0

    def lap(self) -> Lap:
        self.laps += 1
        peak, self.peak = self.peak, self.held
        return Lap(self.held, peak)


def quick(engine: evener.Engine, process: Process, now: list[float]) -> Callable[..., MemoryUse]:
    """Takes a step of a rank whose memory is that of ``process``, after which ``seconds`` pass."""
    watch = Read(engine.learner, process, clock=lambda: now[0])

    def take(peak: int = 0, seconds: float = 0.01, last: bool = False, fails: bool = False) -> MemoryUse:
        batch: Any = SimpleNamespace(micro_batches=[], last=last)
        watch.begin(batch)
        process.peak = max(process.peak, peak)
        if fails:
            watch.relieve(GIB)
        use = watch.end(batch)
        now[0] += seconds
        return use

    return take


def test_the_memory_of_a_process_is_read_now_and_then_and_no_peak_is_lost(engine: evener.Engine) -> None:
    process, now = Process(), [0.0]
    take = quick(engine, process, now)
    assert take(peak=3 * GIB).peak == 3 * GIB
    laps = process.laps
    assert [take(peak=5 * GIB).peak, take().peak] == [3 * GIB, 3 * GIB], "told what was read last"
    assert process.laps == laps
    now[0] += 0.05
    use = take()
    assert (use.peak, process.laps) == (5 * GIB, laps + 1), "the peak of the steps that nobody looked at"
    parts = dict(zip(CATEGORIES, use.parts, strict=True))
    assert parts["activations"] == 3 * GIB, "it came and went in passes, as far as anybody knows"


def test_slow_steps_are_all_looked_at_and_their_peaks_told_apart(engine: evener.Engine) -> None:
    process, now = Process(), [0.0]
    take = quick(engine, process, now)
    assert [take(peak=n * GIB, seconds=0.06).peak // GIB for n in (3, 5, 4)] == [3, 5, 4]


def test_the_last_step_of_an_epoch_new_state_and_a_failure_are_looked_at_at_once(
    engine: evener.Engine,
) -> None:
    process, now = Process(), [0.0]
    take = quick(engine, process, now)
    take()
    assert take(peak=3 * GIB, last=True).peak == 3 * GIB
    assert take().peak == 3 * GIB
    assert take(peak=4 * GIB, fails=True).peak == 4 * GIB
    assert take(peak=5 * GIB).peak == 4 * GIB
    engine.learner.optimizer.state[next(iter(engine.learner.names))] = {}
    assert take().peak == 5 * GIB


class Full(nn.Module):
    """Runs out of memory with more than a few samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has ...")
        found: torch.Tensor = self.layer(x)
        return found


def test_a_step_that_is_taken_again_empties_the_cache_first() -> None:
    card, told = Card(), Remembering()
    full = dataclasses.replace(task(), model=Full)
    with evener.Engine(full, device="cpu", micro_batch="auto", observers=[told], steps=3) as engine:
        engine.learner.watch = Read(engine.learner, card)
        for batch in engine.batches():
            engine.step(batch)
    words = [record.words for kind, record in told.told if kind == "event"]
    assert words == [
        "rank 0 ran out of memory and took the step again, in pieces of 8 samples at most",
        "rank 0 gave 1 GiB that were cached back to its device",
    ]
    assert card.emptied == 1
