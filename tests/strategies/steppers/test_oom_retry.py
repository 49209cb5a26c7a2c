"""Ranks whose memory runs out take their samples in smaller pieces, and nothing else changes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import evener
from evener.components.memory_limits.limits import LimitChange, MemoryLimits
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, OutOfMemoryError
from evener.strategies.steppers import oom_retry as piecewise
from evener.strategies.steppers.oom_retry import MicroBatchSize
from evener.training.engine import Engine
from tests.comparing import worst
from tests.strategies.hungry import (
    BATCH,
    LAYERS,
    ROOMY,
    TIGHT,
    Whole,
    Wide,
    room_for,
    same,
    task,
    trained,
    unlimited,
)


def test_a_limit_that_is_lowered_in_mid_run_changes_no_number() -> None:
    free = unlimited()
    found = trained(memory_limit=str(ROOMY), memory_limit_at=(f"5:0:{TIGHT}",), micro_batch="auto")
    same(free, found)
    assert not any(found["pieces"][:5])
    assert 1 <= found["pieces"][5][0] <= BATCH // 2
    assert not any(retries for (retries,) in found["retries"]), "what fits was known"
    assert found["told"][0].startswith(f"rank 0 takes pieces of {found['pieces'][5][0]} samples at most")


def test_without_auto_a_limit_is_found_by_running_into_it() -> None:
    free = unlimited()
    found = trained(memory_limit=str(ROOMY), memory_limit_at=(f"5:0:{TIGHT}",))
    same(free, found)
    assert found["retries"][5][0] >= 1
    assert 1 <= found["pieces"][5][0] <= BATCH // 2
    assert found["told"][0].startswith("rank 0 ran out of memory")


def test_passes_that_take_more_than_was_learned_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose passes take twice as much all at once, as longer sentences would."""
    monkeypatch.setattr(piecewise, "PATIENCE", 100)
    free, tanh, calls = unlimited(), torch.tanh, 0

    def swollen(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        ballast = [x + 1 for _ in range(4)] if calls > 12 * LAYERS else []
        return tanh(x) + 0 * sum(ballast) if ballast else tanh(x)

    monkeypatch.setattr(torch, "tanh", swollen)
    found = trained(memory_limit=str(room_for(BATCH)), micro_batch="auto")
    same(free, found)
    assert sum(retries for (retries,) in found["retries"]) >= 1
    assert "ran out of memory" in " ".join(found["told"])


def test_ranks_with_unequal_limits_pull_one_load(ranks: Any) -> None:
    """Neither could hold the batch alone, and the smaller one takes smaller pieces."""
    free = unlimited()
    divided = ranks(2).run(
        trained, memory_limit=f"{room_for(8)},{room_for(2)}", micro_batch="auto", balance="auto"
    )
    for found in divided:
        same(free, found)
        assert not any(map(sum, found["retries"]))
    first, second = divided[0]["pieces"][-1]
    assert first > second > 0
    for limit in (room_for(8), room_for(2)):
        with pytest.raises(torch.OutOfMemoryError):
            trained(memory_limit=str(limit), strategy=Whole())


def averaged(**settings: Any) -> tuple[bool, int, dict[str, Tensor]]:
    """Whether the rank took passes again, and the average of the weights that it then has."""
    config = RunConfig(dtype="float64", device="cpu", steps=6, **settings)
    with Engine(task(average=evener.ema(0.5)), config) as engine:
        retries = [engine.step(batch).retries for batch in engine.batches()]
        average = engine.learner.average
        return any(map(any, retries)), average.number, {n: t.clone() for n, t in average.tensors().items()}


def test_passes_that_are_taken_again_are_one_update_of_the_average(ranks: Any) -> None:
    """On all ranks, of which one alone takes them again: averages of other updates would part them."""
    _, number, one_device = averaged(strategy=Whole())
    for has_retried, updates, found in ranks(2).run(averaged, memory_limit=f"{ROOMY},{room_for(6)}"):
        assert has_retried
        assert updates == number
        assert worst(one_device, found) < 1e-9


def test_pieces_grow_again_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "PATIENCE", 2)
    found = trained(memory_limit=str(TIGHT), memory_limit_at=(f"3:0:{ROOMY}",), micro_batch="auto")
    same(unlimited(), found)
    assert found["pieces"][2]
    assert not found["pieces"][-1]
    assert any("tries pieces of any size" in words for words in found["told"])


def test_no_room_for_a_single_sample_ends_the_run() -> None:
    with pytest.raises(
        OutOfMemoryError, match="out of memory with a single sample in a pass of step 3: out of memory"
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


class Spectral(Wide):
    """Its norm's vectors are written in each forward pass; the buffer that is written alike is no reason to warn."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.utils.parametrizations.spectral_norm(self.down)
        self.register_buffer("cached", torch.zeros(3))
        self.cached: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.cached.fill_(1.0)
        return super().forward(x) * self.cached


@pytest.mark.parametrize("settings", [{"micro_batch": "auto"}, {}], ids=str)
def test_a_buffer_that_pieces_write_more_often_is_told(settings: dict[str, Any]) -> None:
    limited: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory_limit": str(TIGHT)}
    with (
        Engine(task(Spectral), **limited, **settings) as engine,
        pytest.warns(
            UserWarning, match=r"buffer down.parametrizations.weight.0._u is written .* rank 0 takes"
        ),
    ):
        engine.step(next(engine.batches()))
    with (
        Engine(task(Spectral), **limited | {"memory_limit": str(4 * ROOMY)}) as engine,
        warnings.catch_warnings(action="error"),
    ):
        engine.step(next(engine.batches()))


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
        steps=6,
        run_dir=tmp_path / "run",
        micro_batch="auto",
        memory_limit=str(TIGHT),
        show=False,
    )
    records = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    told = [record for record in records if record["kind"] == "memory"]
    assert "takes pieces of" in told[0]["words"]
    assert records[0]["words"].startswith("memory of the ranks is limited to")
    assert [record["pieces"] for record in records if record["kind"] == "step"][-1][0] >= 1


# Decided without a device


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=60))
def test_pieces_stay_between_one_and_all(steps: list[tuple[int, bool]]) -> None:
    size = MicroBatchSize(patience=2)
    for wanted, enough in steps:
        most = min(wanted, size.most or wanted)
        if enough:
            size.went_well(wanted)
        else:
            assert size.ran_out(most) == (most > 1)
        assert size.most is None or size.most >= 1


def test_what_fails_is_tried_ever_more_seldom() -> None:
    size, tried = MicroBatchSize(patience=2), []
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
    assert [limits.limit_for(0, step) for step in (2, 3)] == [2**21, 2**20]
    assert [limits.limit_for(1, step) for step in (6, 7)] == [None, 2**10]
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


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.69 GiB", 5 << 29),
        ("XPU out of memory. Tried to allocate 20.00 MiB. GPU", 20 << 20),
        ("out of memory: aten.mm asks for 64 bytes", 0),
    ],
)
def test_what_was_asked_for_is_read_in_the_words_of_the_error(words: str, nbytes: int) -> None:
    assert piecewise.asked_nbytes(words) == nbytes
