"""Layers that are frozen and thawed in mid-run: the training of one device, or refused in words in that step."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.trainable import TrainableParameters
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies.local_steps.strategies import LocalSgd
from evener.strategies.sharded.sharded import Sharded
from evener.training.engine import Engine
from tests import tasks
from tests.engines import assert_same

Weights = dict[str, Tensor]
Plan = dict[int, dict[str, bool]]
"""By step, the layers that are trained from then on, and those that are not."""

THAWED_LATER: Plan = {0: {"0.": False, "2.": False}, 2: {"2.": True}, 4: {"0.": True}}
FROZEN_FOR_A_WHILE: Plan = {1: {"2.": False, "0.bias": False}, 4: {"2.": True}}
ALL_BUT_THE_HEAD: Plan = {3: {"0.": False, "2.": False}}


def task(frozen: bool = False) -> Task:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        made[2].requires_grad_(not frozen)
        return made

    return tasks._task(model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1))


def positions(frozen: bool = False) -> Task:
    """A model that mixes nothing over positions, so that these may be divided."""
    data = torch.utils.data.TensorDataset(tasks.draws(24, 8, 6), tasks.classes(24 * 8, 3).reshape(24, 8))
    loss = nn.CrossEntropyLoss()
    return Task(
        **{
            **vars(task(frozen)),
            "train": data,
            "evaluate": None,
            "metrics": {},
            "loss": loss,
            "forward": lambda model, x: model(x).transpose(1, 2),
        }
    )


def trained(
    plan: Plan, of: Any = task, frozen: bool = False, alone: bool = False, **settings: Any
) -> tuple[Weights, list[float]]:
    """Weights and losses of six steps, before which ``plan`` is carried out."""
    environment = Environment() if alone else None
    config = RunConfig(dtype="float64", steps=6, device="cpu", **{"check_replicas": 1, **settings})
    with (
        Session(device="cpu", environment=environment) as session,
        Engine(of(frozen), config, session=session) as engine,
    ):
        losses = []
        for batch in engine.batches():
            change(engine.model, plan.get(engine.steps_done, {}))
            losses.append(engine.step(batch).loss)
        return {n: t.clone() for n, t in engine.learner.tensors().items()}, losses


def change(model: nn.Module, trained: dict[str, bool]) -> None:
    for layer, wanted in trained.items():
        for name, parameter in model.named_parameters():
            if name.startswith(layer):
                parameter.requires_grad_(wanted)


@pytest.mark.parametrize(
    ("plan", "frozen", "settings"),
    [
        (THAWED_LATER, False, {"balance": "3,1"}),
        (FROZEN_FOR_A_WHILE, False, {"micro_batch": 2}),
        (ALL_BUT_THE_HEAD, False, {"balance": "1,0", "clip_norm": 0.1}),
        ({2: {"2.": True}}, True, {"micro_batch": "auto"}),
        ({2: {"2.": True}}, True, {"allreduce": "native", "balance": "0,1"}),
        (FROZEN_FOR_A_WHILE, False, {"strategy": "tensor"}),
        ({2: {"2.": True}}, True, {"strategy": "tensor"}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(
    ranks: Any, plan: Plan, frozen: bool, settings: dict[str, Any]
) -> None:
    reference, losses = trained(plan, frozen=frozen, alone=True, clip_norm=settings.get("clip_norm"))
    for weights, divided in ranks(2).run(trained, plan, frozen=frozen, **settings):
        assert_same(reference, weights)
        assert divided == pytest.approx(losses, rel=1e-12)


def test_frozen_weights_stay_and_thawed_ones_move() -> None:
    before, _ = trained({0: {"2.": False}}, alone=True)
    later, _ = trained({0: {"2.": False}, 5: {"2.": True}}, alone=True)
    assert not torch.equal(before["2.weight"], later["2.weight"])


@pytest.mark.parametrize("plan", [THAWED_LATER, FROZEN_FOR_A_WHILE], ids=["thawed", "frozen"])
def test_positions_of_sequences_are_divided_all_the_same(ranks: Any, plan: Plan) -> None:
    reference, losses = trained(plan, positions, alone=True)
    for weights, divided in ranks(2).run(trained, plan, positions, strategy="context"):
        assert_same(reference, weights)
        assert divided == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("strategy", ["data_parallel", "layers"])
def test_devices_of_one_process(strategy: str) -> None:
    for plan in (THAWED_LATER, FROZEN_FOR_A_WHILE):
        reference, losses = trained(plan, alone=True)
        weights, divided = trained(plan, alone=True, strategy=strategy, devices="cpu:0,cpu:1")
        assert_same(reference, weights)
        assert divided == pytest.approx(losses, rel=1e-12)


def refused(plan: Plan, everywhere: bool = True, **settings: Any) -> str:
    with Session(device="cpu") as session:
        try:
            trained(plan if everywhere or session.rank == 0 else {}, **settings)
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("strategy", [Sharded(zero=1), Sharded(zero=2), Sharded(zero=3), "pipeline"], ids=str)
def test_a_strategy_that_cannot_follow_says_so_in_that_step(ranks: Any, strategy: Any) -> None:
    for said in ranks(2).run(refused, {2: {"2.": False}}, strategy=strategy):
        assert (
            "cannot follow a change of requires_grad in mid-run: 2.weight is frozen, 2.bias is frozen" in said
        )


@pytest.mark.parametrize(("layer", "wanted"), [("2.", False), ("0.", True)])
def test_a_change_on_one_rank_alone_is_refused_on_all(ranks: Any, layer: str, wanted: bool) -> None:
    """As by an observer, which is told on rank 0 alone."""
    for said in ranks(2).run(refused, {2: {layer: False}, 3: {layer: wanted}}, everywhere=False):
        assert "the ranks train different parameters in step 2: on rank 0 " in said
        assert f"{layer}weight is frozen" in said
        assert "on rank 1 all are trained as at first" in said


def by_hand(
    plan: Plan,
    alone: bool = False,
    everywhere: bool = True,
    frozen: bool = False,
    first: int = 0,
    **settings: Any,
) -> Weights:
    """The weights of steps by SGD, with which a gradient that is summed twice shows.

    Args:
        frozen: True if a layer is frozen at first.
        first: The first layer whose parameters the optimizer holds.
    """

    def optimizer(model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[first:].parameters(), lr=0.3, momentum=0.9)

    environment = Environment() if alone else None
    config = RunConfig(dtype="float64", steps=6, device="cpu", **settings)
    with (
        warnings.catch_warnings(action="ignore"),  # layers that are never trained are warned of
        Session(device="cpu", environment=environment) as session,
        Engine(replace(task(frozen), optimizer=optimizer), config, session=session) as engine,
    ):
        for batch in engine.batches():
            if everywhere or session.rank == 0:
                change(engine.model, plan.get(engine.steps_done, {}))
            micro = batch.micro_batches[0]
            outputs = engine.model(micro.inputs)
            total = nn.functional.cross_entropy(outputs, micro.targets, reduction="sum")
            engine.backward(total, len(micro.targets))
            engine.update()
        return {n: t.clone() for n, t in engine.learner.tensors().items()}


@pytest.mark.parametrize(
    ("plan", "frozen"),
    [(THAWED_LATER, False), (FROZEN_FOR_A_WHILE, False), ({2: {"2.": True}}, True)],
    ids=["thawed", "frozen", "frozen at first"],
)
def test_a_loop_of_the_user_s_own(ranks: Any, plan: Plan, frozen: bool) -> None:
    reference = by_hand(plan, alone=True, frozen=frozen)
    for weights in ranks(2).run(by_hand, plan, frozen=frozen):
        assert_same(reference, weights)


def test_a_loop_of_the_user_s_own_clips_what_its_optimizer_holds(ranks: Any) -> None:
    """The gradients of other parameters are those of a rank's samples: by their norm, ranks would clip differently."""
    reference = by_hand({}, alone=True, first=4, clip_norm=0.2)
    for weights in ranks(2).run(by_hand, {}, first=4, clip_norm=0.2):
        assert_same(reference, weights)


def refused_by_hand(everywhere: bool = False, **settings: Any) -> str:
    try:
        by_hand({2: {"2.": False}}, everywhere=everywhere, **settings)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_loop_of_the_user_s_own_that_changes_one_rank_is_refused(ranks: Any) -> None:
    for said in ranks(2).run(refused_by_hand):
        assert "the ranks train different parameters: on rank 0 2.weight is frozen" in said


@pytest.mark.parametrize("strategy", [Sharded(zero=1), Sharded(zero=2), Sharded(zero=3)], ids=str)
def test_a_strategy_that_cannot_follow_a_loop_of_the_user_s_own_says_so(ranks: Any, strategy: Any) -> None:
    for said in ranks(2).run(refused_by_hand, True, strategy=strategy):
        assert "cannot follow a change of requires_grad in mid-run: 2.weight is frozen" in said


def head_alone(holds_all: bool, **settings: Any) -> Weights:
    """The weights of steps that train the last layer alone, while gradients of all layers are clipped together.

    Args:
        holds_all: True if the optimizer holds the other layers too, with a rate of 0.
    """

    def optimizer(model: nn.Sequential) -> torch.optim.Optimizer:
        others = [{"params": list(model[:4].parameters()), "lr": 0.0}] if holds_all else []
        return torch.optim.SGD([{"params": list(model[4].parameters())}, *others], lr=0.3)

    config = RunConfig(**{"dtype": "float64", "device": "cpu", "clip_norm": 0.2, "steps": 6} | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layers that are never trained are warned of
        with Engine(replace(task(), optimizer=optimizer), config) as engine:
            for batch in engine.batches():
                engine.step(batch)
            return {name: value.clone() for name, value in engine.learner.tensors().items()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": LocalSgd(sync_every=4, num_fragments=2), "steps": 2}],
    ids=["ddp", "local_sgd"],
)
def test_gradients_that_no_update_clears_do_not_add_up(ranks: Any, settings: dict[str, Any]) -> None:
    """They would count in the norm, and be taken for differences of a fragment that merges later."""
    for found, wanted in zip(
        ranks(2).run(head_alone, False, **settings), ranks(2).run(head_alone, True, **settings), strict=True
    ):
        assert_same(wanted, found)


def test_changes_are_told_by_name_and_those_of_the_beginning_are_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    found = TrainableParameters({p: name for name, p in model.named_parameters()}, set(model.parameters()))
    assert not found.update("ddp", follows=True)
    model[1].weight.requires_grad_(True)
    model[0].bias.requires_grad_(False)
    assert found.update("ddp", follows=True)
    assert not found.update("ddp", follows=True)
    assert found.changes == ("0.bias is frozen", "1.weight is thawed")
    model[0].bias.requires_grad_(True)
    with pytest.raises(ConfigurationError, match="update_in_backward cannot follow"):
        found.update("ddp", follows=True, in_backward=True)
