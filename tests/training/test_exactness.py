"""The promise: trained weights do not depend on how the work was divided. Against one device, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.strategies.ddp import Ddp
from evener.strategies.steppers.plain import Plain
from evener.tools.verify import Trajectory, record, relative_error
from tests import tasks
from tests.comparing import worst
from tests.tiers import ALWAYS, NIGHTLY, crossed

TASKS = (
    *("plain", "batch_norm", "tokens", "sparse", "branches"),
    *("penalty", "several", "dropout", "summed", "tiny"),
)


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    config = RunConfig(**({"dtype": "float64", "steps": 12} | settings))
    return record(f"tests.tasks:{name}", None, config, environment)


def apart(reference: Trajectory, other: Trajectory) -> float:
    return worst(reference.weights, other.weights)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_no_error_that_is_not_a_number_passes(names: str) -> None:
    """Wherever it stands among the others."""
    wrong = {"a": torch.tensor([1.0, torch.nan]), "b": torch.ones(2)}
    assert math.isnan(worst(dict.fromkeys(names, torch.ones(2)), {name: wrong[name] for name in names}))


DIVISIONS: dict[str, dict[str, Any]] = {
    "equal": {"balance": "equal"},
    "accumulated": {"balance": "0.5,0.3,0.2", "micro_batch": 4},
    "idle-rank-clipped": {"balance": "1,0,3", "clip_norm": 0.5},
}


@pytest.mark.parametrize(
    ("name", "division"), crossed(TASKS, list(DIVISIONS), lambda task: (ALWAYS, NIGHTLY, NIGHTLY))
)
def test_weights_do_not_depend_on_the_division(ranks: Any, name: str, division: str) -> None:
    settings = DIVISIONS[division]
    if name == "batch_norm" and "micro_batch" in settings:
        settings = settings | {"micro_batch": 3}  # 9 and 2 samples: no micro-batch of one
    reference = trajectory(name, Environment(), **(settings | {"balance": "equal"}))
    divided = ranks(3).run(trajectory, name, **settings)
    assert apart(reference, divided[0]) <= 1e-12
    assert divided[0].losses == pytest.approx(reference.losses, rel=1e-12, nan_ok=True)
    assert len({trajectory.digest for trajectory in divided}) == 1, "replicas differ"


def test_the_reference_is_a_plain_pytorch_loop() -> None:
    """What the engine does on one device is what anyone would write, over the samples in the same order."""
    from evener.data.sampler import Order

    task = tasks.plain()
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = task.optimizer(model.parameters())
    order = Order(tasks.SAMPLES, seed=0)
    inputs, targets = task.train.tensors  # type: ignore[attr-defined]
    losses = []
    for epoch in range(2):
        for start in range(0, tasks.SAMPLES, 13):
            ids = order.ids(epoch, start, min(start + 13, tasks.SAMPLES))
            loss = torch.nn.functional.cross_entropy(model(inputs[ids].double()), targets[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    found = trajectory("plain", Environment(), steps=None)
    assert found.losses == pytest.approx(losses, rel=1e-14)
    for name, value in model.named_parameters():
        assert relative_error(value.detach(), found.weights[name]) <= 1e-14


class OwnMean(Plain):
    """Divides by what makes each rank's own mean, averaged over the ranks, of the sum."""

    def run(self, batch: Any, divisor: Any, step: int) -> Any:
        own = sum(micro.size for micro in batch.micro_batches)
        return super().run(batch, lambda: divisor() and (own or 1) * len(batch.shares), step)


class Averaging(Ddp):
    """The common mistake: every rank's own mean, averaged over the ranks."""

    def stepper(self, learner: Any) -> Any:
        return OwnMean(learner)


def test_averaged_gradients_are_found_out(ranks: Any) -> None:
    reference = trajectory("plain", Environment())
    for shares in ("equal", "0.5,0.3,0.2"):
        averaged = ranks(3).run(
            trajectory, "plain", balance=shares, strategy="tests.training.test_exactness:Averaging"
        )
        assert apart(reference, averaged[0]) > 1e-4


def test_plain_dropout_is_not_the_same_and_is_counted(ranks: Any) -> None:
    divided = ranks(2).run(trajectory, "plain_dropout")
    assert apart(trajectory("plain_dropout", Environment()), divided[0]) > 1e-3
    assert divided[0].drawing_apart == 1


def test_buffers_that_a_forward_pass_writes_stay_equal(ranks: Any) -> None:
    divided = ranks(2).run(trajectory, "buffers")
    assert divided[0].digest == divided[1].digest


def test_an_iterable_dataset_that_is_read_whole_is_that_of_one_device(ranks: Any) -> None:
    settings = {"epochs": 3, "steps": None}
    divided = ranks(2).run(trajectory, "stream", **settings)
    assert apart(trajectory("stream", Environment(), **settings), divided[0]) <= 1e-12


def test_an_iterable_dataset_of_parts_is_summed_exactly(ranks: Any) -> None:
    """There is no global order, so the reference is told which samples made which batch: an epoch in one batch."""
    settings = {"batch_size": 64, "epochs": 3, "steps": None}
    divided = ranks(2).run(trajectory, "stream_of_parts", **settings)
    assert apart(trajectory("stream_of_parts", Environment(), **settings), divided[0]) <= 1e-12


def test_float32_agrees_to_its_own_precision(ranks: Any) -> None:
    reference = trajectory("batch_norm", Environment(), dtype="float32")
    assert apart(reference, ranks(2).run(trajectory, "batch_norm", dtype="float32")[0]) <= 1e-4
