"""What is not finite is named by step, rank and parameter, whatever the strategy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from evener.core.config.run_config import RunConfig
from evener.core.records import SkippedStep
from evener.errors import ConfigurationError, DivergenceError
from evener.training.engine import Engine
from tests.breaking import SAMPLES, brittle
from tests.observers import Remembering
from tests.tiers import ALWAYS, NIGHTLY, spread

EVERY = [
    ("ddp", {}),
    ("sharded", {"strategy_option": ("zero=1",)}),
    ("sharded", {"strategy_option": ("zero=2",)}),
    ("sharded", {"strategy_option": ("zero=3",)}),
    ("tensor", {}),
    ("pipeline", {"strategy_option": ("balance=equal",)}),
    ("ddp", {"bucket_mb": 1e-4}),
]


def stopped(strategy: str, settings: dict[str, Any], by_hand: bool = False, late: bool = False) -> str:
    with mock.patch("evener.training.step.step_sync.is_late", return_value=late):
        engine = Engine(brittle({13: 100.0}), strategy=strategy, device="cpu", **settings)
        with engine:
            try:
                for batch in engine.batches():
                    if by_hand:
                        (micro,) = batch.micro_batches
                        engine.backward(
                            engine.loss.total(engine.model(micro.inputs), micro.targets), len(micro.samples)
                        )
                        engine.update()
                    else:
                        engine.step(batch)
            except DivergenceError as error:
                return str(error)
    return "nothing was said"


def step_of(sample: int) -> int:
    with Engine(brittle(), device="cpu", strategy="single") as engine:
        return next(b.index for b in engine.batches() if sample in b.micro_batches[0].samples)


@pytest.mark.parametrize(("strategy", "settings"), EVERY, ids=str)
def test_a_gradient_names_step_rank_and_parameter_on_every_rank(
    ranks: Any, strategy: str, settings: dict[str, Any]
) -> None:
    said = ranks(2).run(stopped, strategy, settings)
    expected = f"a gradient is not finite in step {step_of(13)} on rank "
    for message in said:
        assert message.startswith(expected)
        assert ": that of inner.bias; " in message
    assert len(set(said)) == 1


@pytest.mark.parametrize(("strategy", "settings"), EVERY[:1] + EVERY[3:4], ids=str)
def test_a_late_device_names_it_too(ranks: Any, strategy: str, settings: dict[str, Any]) -> None:
    for message in ranks(2).run(stopped, strategy, settings, late=True):
        assert ": that of inner.bias; " in message


@pytest.mark.parametrize(
    ("strategy", "settings"), spread(EVERY[:5], ALWAYS, NIGHTLY, NIGHTLY, ALWAYS, ALWAYS), ids=str
)
def test_a_loop_by_hand_names_it_too(ranks: Any, strategy: str, settings: dict[str, Any]) -> None:
    for message in ranks(2).run(stopped, strategy, settings, by_hand=True):
        assert "a gradient is not finite on rank " in message
        assert ", that of inner.bias; " in message


@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", None), ("data_parallel", "cpu:0,cpu:1"), ("layers", "cpu:0,cpu:1")]
)
def test_one_process_names_it_too(strategy: str, devices: str | None) -> None:
    assert ": that of inner.bias; " in stopped(strategy, {"devices": devices})


# Left out


def trained(
    strategy: str, task: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], list[str], list[int]]:
    """State at the end, what was told of steps left out, and the samples of the steps that were not."""
    told = Remembering()
    usual = {"device": "cpu", "dtype": "float64", "non_finite": "skip", "steps": 8}
    with Engine(brittle(**task), strategy=strategy, observers=[told], **(usual | settings)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        state = engine.state_dict()
    events = [event for kind, event in told.told if kind == "event"]
    assert all(isinstance(event, SkippedStep) for event in events)
    assert engine.guard.skipped == len(events)
    return state, [event.words for event in events], [record.step for record in told.steps]


def alone(task: dict[str, Any], left_out: set[int], **settings: Any) -> dict[str, Any]:
    """One device in a loop that leaves out these steps itself."""
    usual = {"device": "cpu", "dtype": "float64", "steps": 8}
    with Engine(brittle(**task), strategy="single", **(usual | settings)) as engine:
        for batch in engine.batches():
            if engine.steps_done in left_out:
                engine.progress.advance(batch)
            else:
                engine.step(batch)
        return engine.state_dict()


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    entries = {f"{n} {k}": v for n, each in state["optimizer"]["state"].items() for k, v in each.items()}
    return {k: v for k, v in (state["model"] | entries).items() if isinstance(v, torch.Tensor)}


def assert_same(state: dict[str, Any], other: dict[str, Any]) -> None:
    found, expected = flat(state), flat(other)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=name)


BAD = {13: 100.0, 22: 200.0}
NORMED = [("ddp", {}), EVERY[1], EVERY[2], EVERY[3], ("tensor", {}), ("pipeline", {})]


@pytest.mark.parametrize(("strategy", "settings"), NORMED, ids=str)
def test_the_other_steps_are_those_of_one_device_that_leaves_out_the_same(
    ranks: Any, strategy: str, settings: dict[str, Any]
) -> None:
    left_out = {step_of(13), step_of(22)}
    task = {"norm": strategy != "tensor"}
    expected = alone(task | {"epochs": 1}, left_out, steps=5)
    for state, words, steps in ranks(2).run(trained, strategy, task | {"bad": BAD}, steps=5, **settings):
        assert len(words) == len(left_out)
        assert any("the loss is nan in step" in each for each in words)
        assert any(": that of " in each for each in words)
        assert steps == list(range(5)), "all are told"
        assert_same(state, expected)


def test_a_device_that_runs_behind_its_host_waits_and_leaves_out_the_same(ranks: Any) -> None:
    expected = alone({"norm": True}, {step_of(13)}, steps=5)
    for state, words, _ in ranks(2).run(behind, {"norm": True, "bad": {13: 100.0}}):
        assert len(words) == 1
        assert_same(state, expected)


def behind(task: dict[str, Any]) -> Any:
    with (
        mock.patch("evener.training.step.step_sync.is_late", return_value=True),
        mock.patch("evener.distributed.session.is_late", return_value=True),
    ):
        return trained("ddp", task, steps=5)


def test_a_run_that_leaves_out_all_is_stopped(ranks: Any) -> None:
    def said() -> str:
        bad = dict.fromkeys(range(SAMPLES), 100.0)
        try:
            trained("ddp", {"bad": bad, "epochs": 9}, steps=None)
        except DivergenceError as error:
            return str(error)
        return "nothing was said"

    for message in ranks(2).run(said):
        assert "in step 10 on rank 0" in message
        assert "the step after 10 in a row" in message


def root_of_nothing(model: nn.Module) -> torch.Tensor:
    """Its gradient is not finite, though it is."""
    return sum(((p * 0).sum().sqrt() for p in model.parameters()), start=torch.zeros(()))


def test_the_gradient_of_a_penalty_changes_no_weight() -> None:
    with Engine(brittle(penalty=root_of_nothing), device="cpu") as engine:
        before = engine.state_dict()
        batch = next(engine.batches())
        with pytest.raises(
            DivergenceError, match="the gradient of the penalty is not finite in step 0 on all"
        ):
            engine.step(batch)
        assert_same(engine.learner.state_dict(), before)


def test_the_gradient_of_a_penalty_is_left_out() -> None:
    with Engine(brittle(penalty=root_of_nothing), device="cpu", steps=2, non_finite="skip") as engine:
        before = engine.state_dict()
        for batch in engine.batches():
            engine.step(batch)
        assert engine.guard.skipped == 2
        assert_same(engine.state_dict(), before)


def test_a_loop_by_hand_cannot_leave_out() -> None:
    with Engine(brittle(), device="cpu", non_finite="skip") as engine:
        total = torch.zeros((), requires_grad=True)
        next(engine.batches())
        with pytest.raises(ConfigurationError, match=r"non_finite=skip goes with engine\.step"):
            engine.backward(total, 1)


@pytest.mark.parametrize("compress", ["int8", "top-k", "powersgd"])
def test_what_is_kept_of_a_bad_step_is_refused(compress: str) -> None:
    with pytest.raises(ConfigurationError, match="never sends a number again"):
        RunConfig(non_finite="skip", compress=compress)
