"""Gradients in a loop of the user's own, and weights outside of the model's forward."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError
from evener.strategies.sharded.zero import Zero
from evener.tools.verify import relative_error
from evener.training.engine import Engine
from tests.comparing import worst
from tests.strategies.seven import normalised, penalised, plain, step_by_hand  # noqa: F401 (some by name)
from tests.strategies.sharded.test_zero import WORDS, recurrent
from tests.tiers import NIGHTLY


def by_hand(
    strategy: Any, change: Callable[[Engine, int], None] | None = None, **settings: Any
) -> dict[str, Tensor]:
    config = RunConfig(strategy=strategy, device="cpu", dtype="float64", epochs=1, clip_norm=0.1, **settings)
    with Engine(plain(), config) as engine:
        for number, batch in enumerate(engine.batches()):
            if change is not None:
                change(engine, number)
            step_by_hand(engine, batch)
        return {name: value.detach().clone() for name, value in engine.learner.tensors().items()}


def drop_one(engine: Engine, number: int) -> None:
    """Gradients that are cleared before they are used."""
    if number == 1:
        micro = torch.ones(3, 7, dtype=torch.float64)
        engine.backward(engine.model(micro).sum(), 3)
        engine.learner.optimizer.zero_grad()


def clamp_one(engine: Engine, number: int) -> None:
    """Weights that are changed in place between steps."""
    if number == 2:
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.clamp_(-0.1, 0.1)


def own_optimizer(engine: Engine, number: int) -> None:
    """Two optimizers that each have some of the parameters."""
    first, *others = engine.model.parameters()
    micro = torch.ones(3, 7, dtype=torch.float64)
    engine.backward(engine.model(micro).square().sum(), 3)
    engine.update(torch.optim.SGD([first], lr=0.1))
    engine.update(torch.optim.SGD(others, lr=0.2))


@pytest.mark.parametrize("change", [pytest.param(None, marks=NIGHTLY), drop_one, clamp_one, own_optimizer])
def test_a_loop_of_the_users_own(ranks: Any, change: Any) -> None:
    (weights,) = ranks(1).run(by_hand, "single", change)
    for stage in (1, 2):
        for found in ranks(3).run(by_hand, Zero(stage, "3,0,2"), change, balance="3,0,1"):
            assert worst(weights, found) <= 1e-11


def changed(how: str) -> str:
    """A gradient that is changed where a rank sees some of its rows only."""
    config = RunConfig(strategy=Zero(), device="cpu", epochs=1)
    with Engine(plain(), config) as engine:
        micro = next(engine.batches()).micro_batches[0]
        engine.backward(engine.model(micro.inputs).sum(), micro.size)
        for parameter in engine.model.parameters():
            parameter.grad = parameter.grad.mul_(0.5) if how == "in place" else parameter.grad * 0.5
        with pytest.raises(ConfigurationError) as caught:
            engine.update()
    return str(caught.value)


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_gradients_are_not_changed_before_they_are_summed(ranks: Any, how: str) -> None:
    for message in ranks(2).run(changed, how):
        assert "the gradient of 0.weight was changed before engine.update() summed it" in message


# What a model is outside of its forward


def looked_at(in_common: bool) -> None:
    config = RunConfig(strategy=Zero(2, "1,2", in_common), device="cpu", dtype="float64", steps=3)
    engine = Engine(recurrent(), config)
    for batch in engine.batches():
        engine.step(batch)
    whole = {name: tensor.clone() for name, tensor in engine.learner.tensors().items()}
    words = torch.zeros(2, 5, dtype=torch.int64)
    pieces = dict(engine.model.named_parameters())
    assert all(shard_spec(p) for name, p in pieces.items() if name not in ("scale", "frozen"))
    if dist.get_rank() == 0:  # no other rank need take part
        outputs = engine.model(words)
    assert {name: p.shape for name, p in engine.model.named_parameters()} == {
        n: p.shape for n, p in pieces.items()
    }
    with pytest.raises(ConfigurationError, match="holds only the pieces that one rank owns"):
        copy.deepcopy(engine.model)(words)
    with pytest.raises(ConfigurationError, match="holds only the pieces that one rank owns"):
        pickle.loads(pickle.dumps(engine.model))(words)
    with pytest.raises(IndexError):
        engine.model(words + WORDS)
    assert engine.model.embed.weight is pieces["embed.weight"], "pieces again, also after an error"
    engine.close()
    left = dict(engine.model.named_parameters())
    assert all(torch.equal(left[name], whole[name]) for name in left)
    dist.barrier()
    for parameter in left.values():  # its own now
        parameter.data.add_(dist.get_rank())
    dist.barrier()
    assert all(torch.equal(left[name], whole[name] + dist.get_rank()) for name in left)
    for parameter in left.values():
        parameter.data.sub_(dist.get_rank())
    if dist.get_rank() == 0:
        assert torch.equal(engine.model(words), outputs)


@pytest.mark.parametrize("in_common", [False, True])
def test_pieces_are_seen_between_steps_and_wholes_when_all_is_over(ranks: Any, in_common: bool) -> None:
    ranks(2).run(looked_at, in_common)


def unequal_replicas(in_common: bool) -> bool:
    """Whether rank 1 has rank 0's rows after a checkpoint was loaded that no step has followed."""
    config = RunConfig(strategy=Zero(in_common=in_common), device="cpu", dtype="float64", steps=2)
    with tempfile.TemporaryDirectory() as made, Engine(recurrent(), config) as engine:
        state = engine.state_dict()
        for batch in engine.batches():
            engine.step(batch)
        trained = engine.predict(engine.task.train, everywhere=True)
        engine.load_state_dict(state)
        found = engine.predict(engine.task.train, everywhere=True)
        assert made
        return relative_error(trained, found) > 1e-3


@pytest.mark.parametrize("in_common", [False, True])
def test_a_state_that_is_taken_up_is_seen_in_the_next_forward(ranks: Any, in_common: bool) -> None:
    assert all(ranks(2).run(unequal_replicas, in_common))
