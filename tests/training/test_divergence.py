"""What is not finite is found in the step in which it arises, and names its rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.losses import loss
from evener.core.task.task import Task
from evener.errors import DivergenceError
from evener.training.engine import Engine
from tests import tasks
from tests.engines import assert_same, copied, engine_of


def diverge(name: str, form: Any, **settings: Any) -> tuple[str, int]:
    with engine_of(name, **settings) as engine:
        try:
            for batch in engine.batches():
                form(engine, batch)
        except DivergenceError as error:
            return str(error), engine.steps_done
    return "nothing was said", -1


def taking_steps(engine: Engine, batch: Any) -> None:
    engine.step(batch)


def taking_them_by_hand(engine: Engine, batch: Any) -> None:
    (micro,) = batch.micro_batches
    total = engine.loss.total(engine.model(micro.inputs), micro.targets)
    engine.backward(total, len(micro.samples))
    engine.update()


def place_of_bad_sample(world_size: int) -> tuple[int, int]:
    """Step and rank that meet the sample whose target is NaN."""
    order = [i for batch in _batches("one_bad_target") for i in batch]
    step, place = divmod(order.index(20), 13)
    size = min(13, tasks.SAMPLES - 13 * step)
    return step, 0 if place < -(-size // world_size) else 1


def _batches(name: str) -> list[list[int]]:
    with engine_of(name, epochs=1) as engine:
        return [batch.micro_batches[0].samples.tolist() for batch in engine.batches()]


@pytest.mark.parametrize("form", [taking_steps, taking_them_by_hand])
def test_a_loss_that_is_nan_names_step_and_rank_on_every_rank(ranks: Any, form: Any) -> None:
    step, rank = place_of_bad_sample(2)
    for message, _ in ranks(2).run(diverge, "one_bad_target", form):
        assert f"the loss is nan in step {step} on rank {rank};" in message


def test_a_nan_loss_in_the_very_last_step_is_found(ranks: Any) -> None:
    step, _ = place_of_bad_sample(2)
    for message, _ in ranks(2).run(diverge, "one_bad_target", taking_steps, steps=step + 1):
        assert f"in step {step} " in message


def test_a_process_alone_keeps_the_weights_before_the_nan() -> None:
    with engine_of("one_bad_target") as engine:
        last = place_of_bad_sample(1)[0]
        for batch in engine.batches():
            before = copied(engine)
            if engine.steps_done == last:
                with pytest.raises(DivergenceError, match="Try a lower learning rate"):
                    engine.step(batch)
                break
            engine.step(batch)
        assert_same(before, copied(engine), 0.0)


def a_gradient_that_is_not_finite(by_hand: bool) -> str:
    """On rank 1 alone; the loss is finite."""

    class Spoiled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            if torch.distributed.get_rank() == 1 and self.training:
                scores = scores + (scores * 0).sqrt() * 0
            return scores

    with Engine(tasks._task(model=lambda: Spoiled(6, 3)), device="cpu", steps=1) as engine:
        try:
            for batch in engine.batches():
                if by_hand:
                    taking_them_by_hand(engine, batch)
                else:
                    engine.step(batch)
        except DivergenceError as error:
            return str(error)
    return "nothing was said"


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gradient_that_is_not_finite_names_step_and_rank(ranks: Any, by_hand: bool) -> None:
    for message in ranks(2).run(a_gradient_that_is_not_finite, by_hand):
        assert "a gradient is not finite" in message
        assert "on rank 1" in message
        assert by_hand or "in step 0" in message


def test_a_penalty_that_is_nan_names_its_own_step() -> None:
    calls = iter(range(9))

    def penalty(model: nn.Module) -> Tensor:
        weights = torch.cat([p.reshape(-1) for p in model.parameters()])
        return weights.sum() * (math.nan if next(calls) == 2 else 0.0)

    with (
        Engine(tasks._task(penalty=penalty), device="cpu", steps=5) as engine,
        pytest.raises(DivergenceError, match="the penalty is nan in step 2 on all ranks"),
    ):
        list(map(engine.step, engine.batches()))
    assert all(p.isfinite().all() for p in engine.model.parameters()), "the update was not made"


def large_gradients(dtype: str) -> list[float]:
    """Each of them is finite in half precision, their sum is not."""
    task = Task(
        model=lambda: nn.Linear(2000, 1, bias=False),
        loss=loss(total=lambda outputs, _: (outputs * 100).sum(), count=len),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-6),
        train=TensorDataset(torch.ones(12, 2000), torch.zeros(12, 1)),
        batch_size=4,
        epochs=1,
    )
    with Engine(task, device="cpu", dtype=dtype) as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
    return [step.loss for step in steps]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_whose_sum_overflows_are_sound(ranks: Any, dtype: str) -> None:
    assert all(map(math.isfinite, large_gradients(dtype)))
    for losses in ranks(2).run(large_gradients, dtype):
        assert len(losses) == 3
        assert all(map(math.isfinite, losses))
