"""What results show of themselves where they are printed: one line."""

from __future__ import annotations

import dataclasses
from typing import Any

from evener.core.records import RunSummary
from evener.tools.bench import BenchResult
from evener.tools.estimate.result import MemoryEstimate, RankMemory
from evener.tools.verify import Verification
from evener.training.run import Trained

SUMMARY = RunSummary(
    task="digits",
    strategy="ddp",
    world_size=2,
    devices=["cpu", "cpu"],
    steps=1200,
    epochs=2,
    samples=5,
    seconds=1.25,
    samples_per_second=4.0,
    final_loss=0.5,
    metrics={"accuracy": 0.9},
    shares=[0.5, 0.5],
    weights_digest="",
    versions={},
    batch_size=2,
    seed=0,
)


def test_a_run() -> None:
    words = "digits: 1,200 steps on 2 ranks in 1.2 s, loss 0.5000, accuracy 0.9000"
    assert repr(SUMMARY) == f"<RunSummary of {words}>"
    assert repr(Trained(SUMMARY, {})) == f"<Trained {words}; weights of 0 names>"


def test_measurements_and_estimates() -> None:
    result = BenchResult(2, simulated=True, rows=[])
    assert repr(result) == "<BenchResult of 2 ranks, simulated: 0 rows, 0 wrong elements>"
    rank = RankMemory(0, 3 * 2**20, {}, between=0, setup_peak=0)
    estimate = MemoryEstimate("digits", "single", "cpu", 64, (64,), (rank,))
    assert repr(estimate) == "<MemoryEstimate of digits: at most 3 MiB on 1 rank (single)>"


def test_a_proof() -> None:
    told: dict[str, Any] = {
        **dict.fromkeys((entry.name for entry in dataclasses.fields(Verification)), None),
        **{"task": "plain", "times_floor": 1.25, "steps": 5, "processes": 2, "worst": "the weight 0.bias"},
    }
    result = Verification(**{**told, "passed": True})
    assert repr(result) == (
        "<Verification of plain: the same training, 1.25 times the floor, 5 steps on 2 processes>"
    )
    assert ": NOT the same training: the weight 0.bias, " in repr(Verification(**{**told, "passed": False}))
