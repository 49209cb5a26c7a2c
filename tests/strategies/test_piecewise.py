"""Ranks whose memory runs out take their samples in smaller pieces, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.config import RunConfig
from evener.engine import Engine
from evener.errors import ConfigurationError, OutOfMemoryError
from evener.strategies import piecewise
from evener.strategies.limits import LimitChange, MemoryLimits
from evener.strategies.piecewise import PieceSize
from evener.strategies.plain import Plain
from evener.strategies.single import Single
from tests.comparing import worst
from tests.tasks import classes, draws

WIDTH, LAYERS, SAMPLES, BATCH = 512, 10, 96, 24


class Wide(nn.Module):
    """Of small weights, and many activations: ``LAYERS`` numbers of 8 bytes a sample for each of ``WIDTH``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, WIDTH), evener.nn.Dropout(0.2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.up(x))
        for _ in range(LAYERS):
            x = torch.tanh(x)
        outputs: Tensor = self.down(x)
        return outputs


def task(model: Any = Wide, **parts: Any) -> evener.Task:
    data = TensorDataset(draws(SAMPLES, 4), classes(SAMPLES, 3))
    usual: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "batch_size": BATCH,
        "epochs": 4,
    }
    return evener.Task(model=model, train=data, evaluate=data, **(usual | parts))


def room_for(samples: int) -> int:
    """Weights, gradients, the optimizer's state and what an update makes in passing, and so many samples."""
    return 8 * sum(8 * p.numel() for p in Wide().parameters()) + samples * (LAYERS + 4) * WIDTH * 8


ROOMY, TIGHT = room_for(2 * BATCH), room_for(4)


class Whole(Single):
    """One device that takes each batch as it is."""

    def stepper(self, learner: Any) -> Any:
        return Plain(learner)


def trained(**settings: Any) -> dict[str, Any]:
    told: list[str] = []

    class Told(evener.Observer):
        def event(self, record: Any) -> None:
            told.append(record.words)

    settings = {"dtype": "float64", "device": "cpu", "steps": 12} | settings
    with Engine(task(), observers=[Told()], **settings) as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
        return {
            "losses": [step.loss for step in steps],
            "weights": {name: value.clone() for name, value in engine.learner.tensors().items()},
            "pieces": [step.pieces for step in steps],
            "retries": [step.retries for step in steps],
            "told": told,
        }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-12)
    assert worst(one["weights"], other["weights"]) <= 1e-12


def test_a_limit_that_is_lowered_in_mid_run_changes_no_number() -> None:
    free = trained()
    found = trained(memory_limit=str(ROOMY), memory_limit_at=(f"5:0:{TIGHT}",), micro_batch="auto")
    same(free, found)
    assert not any(found["pieces"][:5])
    assert found["retries"][5][0] >= 1
    assert 1 <= found["pieces"][5][0] <= BATCH // 2
    assert found["told"][0].startswith("rank 0 ran out of memory")


def test_ranks_with_unequal_limits_pull_one_load(ranks: Any) -> None:
    """Neither could hold the batch alone, and the smaller one takes smaller pieces."""
    free = trained()
    divided = ranks(2).run(
        trained, memory_limit=f"{room_for(8)},{room_for(2)}", micro_batch="auto", balance="auto"
    )
    for found in divided:
        same(free, found)
    first, second = divided[0]["pieces"][-1]
    assert first > second > 0
    for limit in (room_for(8), room_for(2)):
        with pytest.raises(torch.OutOfMemoryError):
            trained(memory_limit=str(limit), strategy=Whole())


def test_pieces_grow_again_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "PATIENCE", 2)
    found = trained(memory_limit=str(TIGHT), memory_limit_at=(f"3:0:{ROOMY}",), micro_batch="auto")
    same(trained(), found)
    assert found["pieces"][2]
    assert not found["pieces"][-1]
    assert any("tries pieces of any size" in words for words in found["told"])


def test_no_room_for_a_single_sample_ends_the_run() -> None:
    with pytest.raises(
        OutOfMemoryError, match="there is no room for a single sample in step 3: out of memory"
    ):
        trained(memory_limit=str(ROOMY), memory_limit_at=(f"3:0:{room_for(0) // 2}",), micro_batch="auto")


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_statistics_of_a_batch_are_not_cut_in_silence() -> None:
    with pytest.raises(
        ConfigurationError, match=r"micro_batch=auto takes samples in pieces .* and 1 normalizes"
    ):
        Engine(task(normalized), device="cpu", micro_batch="auto")
    with (
        Engine(task(normalized), device="cpu", memory_limit="1KiB") as engine,
        pytest.raises(torch.OutOfMemoryError, match="the limit is 1024"),
    ):
        engine.step(next(engine.batches()))


def refusal(strategy: str) -> str:
    try:
        with Engine(task(), device="cpu", strategy=strategy, micro_batch="auto"):
            return "nothing was said"
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_strategies_whose_ranks_meet_in_between_refuse(ranks: Any, strategy: str) -> None:
    for words in ranks(2).run(refusal, strategy):
        assert words.startswith(
            "micro_batch=auto goes with strategies whose ranks meet for the sum of gradients alone"
        )
        assert repr(strategy) in words


def test_devices_of_one_process_have_no_limits() -> None:
    with pytest.raises(
        ConfigurationError, match="memory_limit is that of a rank with one device, and strategy 'layers'"
    ):
        Engine(task(), device="cpu", strategy="layers", devices="cpu:0,cpu:1", memory_limit="1GB")


def test_the_record_tells_why(tmp_path: Path) -> None:
    evener.fit(
        task(),
        device="cpu",
        processes=1,
        dtype="float64",
        run_dir=tmp_path / "run",
        micro_batch="auto",
        memory_limit=str(TIGHT),
        show=False,
    )
    records = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    told = [record for record in records if record["kind"] == "memory"]
    assert "ran out of memory" in told[0]["words"]
    assert records[0]["words"].startswith("memory of the ranks is limited to")
    assert [record["pieces"] for record in records if record["kind"] == "step"][-1][0] >= 1


# Decided without a device


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=60))
def test_pieces_stay_between_one_and_all(steps: list[tuple[int, bool]]) -> None:
    size = PieceSize(patience=2)
    for wanted, enough in steps:
        most = min(wanted, size.most or wanted)
        if enough:
            size.went_well(wanted)
        else:
            assert size.ran_out(most) == (most > 1)
        assert size.most is None or size.most >= 1


def test_what_fails_is_tried_ever_more_seldom() -> None:
    size, tried = PieceSize(patience=2), []
    size.ran_out(16)
    for step in range(100):
        if size.most != 8:
            tried.append(step)
            size.ran_out(16)
        size.went_well(16)
    assert tried == [2, 6, 14, 30, 62]


def test_limits_are_by_rank_and_step() -> None:
    limits = MemoryLimits.parse("2MiB,-", ("7:1:1KiB", "3:0:1MiB"), 2)
    assert limits == MemoryLimits((2**21, None), (LimitChange(3, 0, 2**20), LimitChange(7, 1, 2**10)))
    assert [limits.of(0, step) for step in (2, 3)] == [2**21, 2**20]
    assert [limits.of(1, step) for step in (6, 7)] == [None, 2**10]
    assert MemoryLimits.parse(None, (), 2) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory_limit": "much"}, "'much' is no size"),
        ({"memory_limit": "1GB,2GB"}, "has 2 limits for 1 ranks"),
        ({"memory_limit_at": ("soon:0:1GB",)}, "is not STEP:RANK:SIZE"),
        ({"memory_limit_at": ("1:1:1GB",)}, "there are 1 ranks"),
    ],
)
def test_limits_that_there_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Engine(task(), device="cpu", **settings)


@pytest.mark.parametrize("value", ["many", "0", 0, 1.5])
def test_micro_batches_that_there_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="micro_batch is"):
        RunConfig(micro_batch=value)
