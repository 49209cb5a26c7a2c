"""What each step takes of a rank's memory, by what it is for, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from evener.records import StepRecord
from tests.observers import Remembering
from tests.ranks import RankPool

WIDTH, SAMPLES, MIB = 512, 64, 2**20
NBYTES = 4 * (WIDTH * WIDTH + WIDTH)


def task(optimizer: Any = None) -> evener.Task:
    """One linear layer of 1 MiB, whose activations are small beside it."""
    return evener.Task(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        loss=nn.MSELoss(),
        optimizer=optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        train=TensorDataset(torch.rand(SAMPLES, WIDTH), torch.rand(SAMPLES, WIDTH)),
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
