from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, TaskError
from evener.strategies.base import Strategy
from evener.strategies.ddp import Ddp, DdpSum
from evener.strategies.interfaces import StrategySettings
from evener.strategies.registry import strategy_called
from evener.strategies.single import Single
from evener.training.engine import Engine
from tests import tasks
from tests.tiers import ALWAYS, NIGHTLY, crossed


def train(name: str, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, bool]]:
    """The weights after some steps, and for each parameter whether the optimizer ever stepped it."""
    config = RunConfig(**({"dtype": "float64", "device": "cpu", "steps": 9} | settings))
    with Engine(getattr(tasks, name)(), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
        state = engine.learner.optimizer.state
        stepped = {name: parameter in state for name, parameter in engine.model.named_parameters()}
        named = [*engine.model.named_parameters(), *engine.model.named_buffers()]
        return {name: value.detach().clone() for name, value in named}, stepped


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], rtol: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=rtol, atol=rtol, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("branches", {}),  # with batches of 5, a layer is used by one rank, by both or by none
        ("branches", {"micro_batch": 2}),
        pytest.param("branches", {"balance": "0,1"}, marks=NIGHTLY),
        ("skips_later", {}),
        ("hooked", {"clip_norm": 0.01}),
        ("hooked", {"micro_batch": 2}),
        ("hooked", {"exact": "bits", "grain": 2}),
        ("late_gaps", {}),
        ("no_gradients", {}),
        ("no_gradients", {"micro_batch": 2, "balance": "1,4"}),
        ("no_gradients", {"exact": "bits", "grain": 2}),
        ("last_micro_batch_skips", {"micro_batch": 6}),
        ("layouts", {"clip_norm": 0.1}),
        ("sparse", {"micro_batch": 6, "clip_norm": 0.1}),
    ],
    ids=str,
)
def test_gradients_that_are_missing_or_odd(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    """Weight decay and momentum move a weight whose gradient is zero, and leave one whose gradient is None."""
    reference, stepped = train(name, **(settings | {"balance": "equal"}))
    for weights, found in ranks(2).run(train, name, **settings):
        assert_same(reference, weights)
        assert found == stepped


def calls_of_hooks(**settings: Any) -> dict[str, int]:
    """How often the hooks of each parameter are called."""
    config = RunConfig(dtype="float64", device="cpu", steps=9, **settings)
    with Engine(tasks.branches(), config) as engine:
        calls: dict[str, int] = {}
        for name, parameter in engine.model.named_parameters():
            calls[name] = 0
            if parameter.requires_grad:
                parameter.register_hook(lambda _, name=name: calls.update({name: calls[name] + 1}))
        for batch in engine.batches():
            engine.step(batch)
        return calls


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 2}], ids=str)
def test_the_hook_of_a_layer_that_no_rank_has_used_is_not_called(
    ranks: Any, settings: dict[str, Any]
) -> None:
    reference = calls_of_hooks()
    assert 0 < reference["branches.2.weight"] < reference["branches.1.weight"]
    for calls in ranks(2).run(calls_of_hooks, **settings):
        assert calls == reference
        assert not calls["never.weight"]


def train_hooked_later(in_training: bool, **settings: Any) -> dict[str, torch.Tensor]:
    config = RunConfig(dtype="float64", device="cpu", steps=4, **settings)
    with Engine(tasks.hooked_later(in_training), config) as engine:
        for number, batch in enumerate(engine.batches()):
            if number == 2 and not in_training:
                engine.evaluate()
            engine.step(batch)
        return {name: value.detach().clone() for name, value in engine.model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 2}], ids=str)
def test_a_hook_that_comes_after_the_first_step_gets_the_whole_gradient(
    ranks: Any, settings: dict[str, Any]
) -> None:
    reference = train_hooked_later(False)
    for weights in ranks(2).run(train_hooked_later, False, **settings):
        assert_same(reference, weights)


def refused_within_a_step() -> str:
    with pytest.raises(ConfigurationError) as caught:
        train_hooked_later(True)
    return str(caught.value)


def test_a_hook_that_comes_within_a_step_is_refused(ranks: Any) -> None:
    for message in ranks(2).run(refused_within_a_step):
        assert message.startswith("weight got a hook on its gradient within a step")


def test_a_layer_that_no_rank_uses_is_left_alone(ranks: Any) -> None:
    torch.manual_seed(0)
    first = tasks.Branches().double().state_dict()
    (weights, stepped), _ = ranks(2).run(train, "branches")
    for name in ("never.weight", "never.bias", "frozen"):
        torch.testing.assert_close(weights[name], first[name], rtol=0, atol=0)
        assert not stepped[name]
    assert stepped["branches.0.weight"]


@pytest.mark.parametrize(
    ("settings", "name"),
    crossed(
        [{}, {"micro_batch": 4}, {"balance": "0,1"}],
        ["buffers", "replaced_buffers"],
        lambda _: (ALWAYS, NIGHTLY),
    ),
)
def test_replicas_agree_on_buffers(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    (first, _), (second, _) = ranks(2).run(train, name, **settings)
    assert_same(first, second, rtol=0)
    assert first["average"].abs().sum() > 0


def draws_its_own_weights() -> list[torch.Tensor]:
    """A constructor that does not draw from torch's seeded generator."""

    def model() -> torch.nn.Module:
        built = torch.nn.Linear(2, 2)
        with torch.no_grad():
            built.weight.fill_(torch.distributed.get_rank())
        return built

    with Engine(tasks._task(model=model), device="cpu") as engine:
        return [value.clone() for value in engine.model.state_dict().values()]


def test_replicas_start_from_the_weights_of_rank_0(ranks: Any) -> None:
    for weights in ranks(2).run(draws_its_own_weights):
        assert weights[0].eq(0).all()


def first_draws(seed: int) -> tuple[float, float]:
    with Engine(tasks.plain(), device="cpu", seed=seed) as engine:
        return float(sum(p.sum() for p in engine.model.parameters())), float(torch.rand(()))


def test_ranks_draw_the_same_weights_and_then_other_numbers(ranks: Any) -> None:
    """Plain dropout must not drop the same places on every rank."""
    for seed in (0, 2**50):
        (weights, draw), (other_weights, other_draw) = ranks(2).run(first_draws, seed)
        assert weights == other_weights
        assert draw != other_draw


def manual_on_a_stranger() -> str:
    with Engine(tasks.plain(), device="cpu") as engine:
        stranger = torch.nn.Linear(6, 3)
        batch = next(engine.batches())
        engine.backward(stranger(batch.micro_batches[0].inputs).sum(), 1)
        try:
            engine.update(torch.optim.SGD(stranger.parameters(), lr=0.1))
        except ConfigurationError as error:
            return str(error)
    return "nothing was said"


def test_parameters_outside_of_the_model_are_refused(ranks: Any) -> None:
    for message in ranks(2).run(manual_on_a_stranger):
        assert "not of the task's model" in message


class Converts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last.to(torch.float32)(self.first(x).float())
        return scores


def convert_in_forward() -> str:
    config = RunConfig(dtype="bfloat16", device="cpu", steps=2)
    with Engine(replace(tasks.plain(), model=Converts), config) as engine:
        try:
            for batch in engine.batches():
                engine.step(batch)
        except TaskError as error:
            return str(error)
    return "nothing was said"


def test_a_parameter_that_changes_its_type_is_refused(ranks: Any) -> None:
    for message in ranks(2).run(convert_in_forward):
        assert "last.weight was of torch.bfloat16" in message


class Custom(Single):
    pass


def test_strategies_by_name() -> None:
    assert type(strategy_called("ddp")) is Ddp
    assert isinstance(strategy_called(f"{__name__}:Custom"), Strategy)
    with pytest.raises(ConfigurationError, match="one rank, not on 2"):
        strategy_called("single").layout(2, StrategySettings())
    for name, words in (
        ("nothing", "no strategy is called 'nothing'; known are auto, single"),
        ("no.module:Class", "there is no module 'no'"),
        ("evener.strategies.ddp:Nothing", "has no Nothing; of this kind it has Ddp"),
        (f"{__name__}:train", "of type function, not a subclass of"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            strategy_called(name)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": lambda: 3}, "returned int"),
        ({"model": torch.nn.Tanh}, "no parameter that requires a gradient"),
        ({"optimizer": lambda parameters: None}, "returned NoneType"),
    ],
)
def test_parts_that_cannot_train_are_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        Engine(tasks._task(**parts), device="cpu")


def bucket_sizes() -> list[int]:
    """As the settings say; by default; and by default where all-reduces are known to be slow to start."""
    found = []
    for bucket_mb, expected_seconds in ((2.0, None), (None, None), (None, lambda nbytes: 1.0)):
        with Engine(tasks.branches(), RunConfig(device="cpu", steps=1, bucket_mb=bucket_mb)) as engine:
            strategy = engine.learner.synchronizer
            assert isinstance(strategy, DdpSum)
            if expected_seconds is not None:
                strategy._all_reduce.expected_seconds = expected_seconds  # type: ignore[method-assign]
            for batch in engine.batches():
                engine.step(batch)
            found += [
                strategy.bucket_bytes,
                sum(p.nbytes for p in engine.model.parameters() if p.requires_grad),
            ]
    return found


def test_buckets_are_as_large_as_asked_for_or_as_is_best(ranks: Any) -> None:
    asked, _, default, _, chosen, gradients = ranks(2).run(bucket_sizes)[0]
    assert (asked, default) == (2 * 2**20, 25 * 2**20)
    assert chosen == gradients
