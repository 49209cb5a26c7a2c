from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.errors import ConfigurationError
from evener.nn.batch_norm import BatchNorm
from evener.strategies.sync_batch_norm import words_of_normalization
from evener.tools.conformance import tasks
from evener.training.engine import Engine
from tests.engines import Weights, assert_same
from tests.tiers import ALWAYS, NIGHTLY, spread

STEPS = 5
SETTINGS: dict[str, Any] = {"dtype": "float64", "device": "cpu", "steps": STEPS}


def whole(engine: Engine) -> Weights:
    return {name: value.detach().clone() for name, value in engine.learner.tensors().items()}


def taken(task: Any, by_hand: bool = False, **settings: Any) -> tuple[Weights, list[tuple[int, ...]], str]:
    """What a rank holds after some steps, the shares of each, and what is said of them."""
    shares = []
    with Engine(task(), **(SETTINGS | settings)) as engine:
        for batch in engine.batches():
            shares.append(batch.shares)
            if by_hand:
                micro = batch.micro_batches[0]
                total = nn.functional.cross_entropy(
                    engine.model(micro.inputs), micro.targets, reduction="sum"
                )
                engine.backward(total, len(micro.samples))
                engine.update()
            else:
                engine.step(batch)
        return whole(engine), shares, words_of_normalization(engine.learner)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def by_parts(task: Any, shares: list[tuple[int, ...]]) -> Weights:
    """The same steps on one device, each part of a batch normalized by itself; of the running statistics those of the
    first part with samples stay."""
    with Engine(task(), **SETTINGS, strategy="single") as engine:
        model, optimizer = engine.model, engine.learner.optimizer
        batches = iter(engine.batches())
        for sizes in shares:
            batch = next(batches)
            micro, before, kept = batch.micro_batches[0], buffers_of(model), None
            for x, y in zip(micro.inputs.split(sizes), micro.targets.split(sizes), strict=True):
                if len(x):
                    model.load_state_dict(before, strict=False)
                    (nn.functional.cross_entropy(model(x), y, reduction="sum") / batch.size).backward()
                    kept = kept or buffers_of(model)
            model.load_state_dict(kept or {}, strict=False)
            optimizer.step()
            optimizer.zero_grad()
            engine.progress.advance(batch)  # a loop that the engine is not told of
        return whole(engine)


@pytest.mark.parametrize("by_hand", [False, True])
def test_local_statistics_are_those_of_each_rank(ranks: Any, by_hand: bool) -> None:
    answers = ranks(2).run(taken, tasks.batch_norm, by_hand, batch_norm="local", balance="2,1")
    expected = by_parts(tasks.batch_norm, answers[0][1])
    for weights, _, words in answers:
        assert_same(weights, expected)
        assert (
            words == "BatchNorm by each rank's own samples (batch_norm=local): not the training of one device"
        )
    assert all(torch.equal(answers[0][0][name], answers[1][0][name]) for name in expected)


def test_exact_statistics_are_those_of_one_device_and_nothing_is_said(ranks: Any) -> None:
    expected = taken(tasks.batch_norm, strategy="single")[0]
    for weights, _, words in ranks(2).run(taken, tasks.batch_norm, balance="2,1"):
        assert_same(weights, expected)
        assert words == ""


@pytest.mark.parametrize(
    "settings",
    spread([{}, {"strategy": "sharded", "strategy_option": ("zero=1",)}], ALWAYS, NIGHTLY),
    ids=str,
)
def test_a_rank_without_samples_leaves_no_trace(ranks: Any, settings: dict[str, Any]) -> None:
    """All samples are on rank 1, whose statistics are then those of all; a placeholder is one sample, of which plain
    BatchNorm would have no variance."""
    expected = taken(tasks.batch_norm_of_few, strategy="single")[0]
    for weights, _, _ in ranks(2).run(
        taken, tasks.batch_norm_of_few, batch_norm="local", balance="0,1", **settings
    ):
        assert_same(weights, expected)


def refused(task: Any, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught, Engine(task(), **(SETTINGS | settings)):
        pass
    return str(caught.value)


def test_where_a_rank_has_no_samples_of_its_own_it_is_refused(ranks: Any) -> None:
    local = {"batch_norm": "local"}
    several = {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"}
    assert "strategy 'data_parallel' has one" in refused(tasks.batch_norm, local | several)
    for words in ranks(2).run(refused, tasks.batch_norm, local | {"strategy": "context"}):
        assert "over the axis 'context'" in words
    assert "batch_norm is 'rank'; it must be one of exact, local" in refused(
        tasks.batch_norm, {"batch_norm": "rank"}
    )


def test_a_model_without_batch_norm_is_told() -> None:
    with (
        pytest.warns(UserWarning, match="batch_norm=local changes nothing"),
        Engine(tasks.plain(), **SETTINGS, batch_norm="local") as engine,
    ):
        assert words_of_normalization(engine.learner) == ""


def test_on_one_rank_local_is_exact() -> None:
    local, _, words = taken(tasks.batch_norm, batch_norm="local")
    assert_same(local, taken(tasks.batch_norm)[0], 0.0)
    assert words == ""


def kinds_in_copy() -> list[bool]:
    with Engine(tasks.batch_norm(), **SETTINGS, batch_norm="local") as engine:
        twin = copy.deepcopy(engine.model)
        return [module.is_exact for module in twin.modules() if isinstance(module, BatchNorm)]


def test_a_copy_stays_local() -> None:
    assert kinds_in_copy() == [False, False]
