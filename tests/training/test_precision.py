"""Reduced precision over ranks: one device's training in the same precision, and overflows that all ranks leave out."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank, is_initialized

from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, DivergenceError
from evener.strategies.sharded.sharded import Sharded
from evener.tools.verify import Trajectory, record
from evener.tools.verify.comparison import ComparedRuns, Verification, compare, type_of
from evener.tools.verify.verification import OneDevice, alone, judge
from evener.training.engine import Engine
from tests import tasks
from tests.tiers import NIGHTLY, SLOW, crossed, spread
from tests.zoo import faults

EVERY = {
    "ddp": (3, {"strategy": "ddp", "balance": "3,0,1"}),
    "all-reduce of messages": (3, {"strategy": "ddp", "allreduce": "ring"}),
    "sharded 1": (3, {"strategy": Sharded(zero=1, shard_sizes="2,1,1"), "balance": "3,0,1"}),
    "sharded 2": (3, {"strategy": Sharded(zero=2), "balance": "1,2,0"}),
    "sharded 3": (3, {"strategy": Sharded(zero=3), "balance": "3,1,2"}),
    "pipeline": (2, {"strategy": "pipeline", "strategy_option": ("balance=equal",)}),
    "tensor": (2, {"strategy": "tensor"}),
    "context": (2, {"strategy": "context"}),
    "data_parallel": (1, {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"}),
    "layers": (1, {"strategy": "layers", "devices": "cpu:0,cpu:1"}),
}
MODEL = "tests.conformance.models:transformer"


@cache
def on_one(model: str, precision: str) -> OneDevice:
    config = alone(RunConfig(device="cpu", precision=precision, steps=4, micro_batch=6))
    return OneDevice(partial(record, model, None, config, Environment()), torch.finfo(type_of(config)).eps)


def verdict(ranks: Any, how: Any, precision: str, model: str = MODEL, **given: Any) -> Verification:
    world, settings = how
    config = RunConfig(device="cpu", precision=precision, steps=4, micro_batch=6, **settings)
    divided: list[Trajectory] = ranks(world).run(record, model, None, config, **given)
    one = on_one(model, precision)
    return judge(
        one, lambda: compare(ComparedRuns(one.reference, divided, one.disturbed, one.reordered), config, "it")
    )


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *crossed(EVERY, ["bf16", "fp16"], lambda strategy: (SLOW, NIGHTLY)),
        *spread(
            [
                (strategy, "bf16-true")
                for strategy in ("all-reduce of messages", "sharded 3", "data_parallel")
            ],
            SLOW,
        ),
    ],
)
def test_it_is_the_training_of_one_device_in_that_precision(
    ranks: Any, strategy: str, precision: str
) -> None:
    found = verdict(ranks, EVERY[strategy], precision)
    assert found.passed, found.hint
    exact = on_one(MODEL, "fp32").reference.losses
    assert found.losses[1] != pytest.approx(exact[1], rel=1e-6)  # else it was computed in float32
    assert found.losses[1] == pytest.approx(exact[1], rel=0.1)


@pytest.mark.slow
def test_statistics_of_a_batch_are_those_of_all_ranks(ranks: Any) -> None:
    found = verdict(ranks, EVERY["ddp"], "bf16", "tests.conformance.models:convolution")
    assert found.passed, found.hint


def test_a_mean_over_ranks_instead_of_a_sum_is_found(ranks: Any) -> None:
    assert not verdict(ranks, (2, {"strategy": "ddp"}), "bf16", batches=faults.averaged).passed


# Overflows


class Overflows(nn.Linear):
    """The gradient of its outputs is not finite on rank 1, or on one device, in steps 1 and 3."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        if self.training and outputs.requires_grad:
            outputs.register_hook(self._spoiled)
        return outputs

    def _spoiled(self, gradient: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", -1) + 1
        here = not is_initialized() or get_rank() == 1
        return gradient * 1e30 if here and self.seen in (1, 3) else gradient


class Told(Observer):
    def __init__(self) -> None:
        self.words: list[str] = []

    def event(self, record: Any) -> None:
        self.words.append(record.words)


def overflowing(optimizer: Any = None, **settings: Any) -> dict[str, Any]:
    told = Told()
    task = tasks._task(
        model=lambda: nn.Sequential(Overflows(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        **({} if optimizer is None else {"optimizer": optimizer}),
    )
    with Engine(task, device="cpu", precision="fp16", steps=6, observers=[told], **settings) as engine:
        weights = []
        for batch in engine.batches():
            engine.step(batch)
            weights.append({name: value.clone() for name, value in engine.learner.tensors().items()})
        assert engine.learner.scale is not None
        return {
            "weights": weights,
            "scale": engine.learner.scale.value,
            "skipped": engine.guard.skipped,
            "words": told.words,
        }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("ddp", None),
        (Sharded(zero=2), None),
        (Sharded(zero=3), None),
        (Sharded(zero=2), torch.optim.Adafactor),
        (Sharded(zero=3), torch.optim.Adafactor),
    ],
    ids=["ddp", "zero=2", "zero=3", "whole weights, zero=2", "whole weights, zero=3"],
)
def test_an_overflow_on_one_rank_is_left_out_on_all(ranks: Any, strategy: Any, optimizer: Any) -> None:
    first, second = ranks(2).run(overflowing, optimizer, strategy=strategy, balance="2,1")
    for found in (first, second):
        weights = found["weights"]
        assert [same(a, b) for a, b in pairwise(weights)] == [
            True,
            False,
            True,
            False,
            False,
        ]
        assert (found["scale"], found["skipped"]) == (2.0**14, 2)
    assert all(same(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert first["words"][0] == (
        "a gradient is not finite in step 1 on rank 1: that of 0.bias, with a loss scale of 65536: its update is left "
        "out on all ranks, and the scale is 32768 from here on"
    )


def test_what_is_left_is_the_training_of_one_device(ranks: Any) -> None:
    one, divided = overflowing(), ranks(2).run(overflowing, balance="2,1")[0]
    for name, value in one["weights"][-1].items():
        assert torch.allclose(value.float(), divided["weights"][-1][name].float(), atol=2e-2), name


def test_an_overflow_that_no_scale_explains_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.components.amp.grad_scaler.FIRST", 1.0)
    with pytest.raises(
        DivergenceError, match=r"a gradient is not finite in step 1 on rank 0: that of 0.bias"
    ):
        overflowing()


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    with (
        Engine(tasks.one_bad_target(), device="cpu", precision="fp16") as engine,
        pytest.raises(DivergenceError, match="the loss is nan"),
    ):
        list(map(engine.step, engine.batches()))
    assert engine.learner.scale is not None
    assert engine.learner.scale.value == 2.0**16


def test_small_gradients_survive_float16() -> None:
    """1e-7 times a loss: without a scale float16 has no such numbers."""

    def task() -> Any:
        return tasks._task(
            loss=tasks.evener.loss(total=lambda outputs, _: outputs.sum() * 1e-7, count=len),
            model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 1.0),
        )

    gradients = []
    for precision in ("fp16", "fp32"):
        with Engine(task(), device="cpu", precision=precision, steps=1) as engine:
            seen: list[Tensor] = []
            engine.learner.optimizer.register_step_pre_hook(
                lambda *_: seen.append(next(engine.model.parameters()).grad.clone())  # noqa: B023
            )
            list(map(engine.step, engine.batches()))
            gradients.append(seen[0])
    assert gradients[1].abs().max() > 1e-9
    assert torch.allclose(*gradients, rtol=1e-2, atol=0)


def scales_of_a_run_that_goes_on(directory: Any) -> list[float]:
    task = tasks._task(model=lambda: nn.Sequential(Overflows(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    found = []
    for steps in (2, 4):
        with Engine(task, device="cpu", precision="fp16", steps=steps) as engine:
            assert engine.learner.scale is not None
            if steps == 4:
                engine.load(directory)
                found.append(engine.learner.scale.value)
            list(map(engine.step, engine.batches()))
            found.append(engine.learner.scale.value)
            engine.save(directory)
    return found


def test_the_scale_is_part_of_a_checkpoint(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2).run(scales_of_a_run_that_goes_on, tmp_path)[0] == [2.0**15, 2.0**15, 2.0**14]


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "half"}, "precision is 'half'; it must be one of fp32"),
        ({"precision": "bf16", "dtype": "float64"}, "dtype float64 and precision both say"),
        ({"precision_of": ("head",)}, "precision_of 'head' is not PATTERN=PRECISION"),
        ({"precision_of": ("head=int8",)}, "with one of fp32, bf16, fp16"),
        ({"precision": "bf16-true", "precision_of": ("a=fp32",)}, "casts the whole model"),
        ({"precision": "fp16", "compress": "int8"}, "fp16 may have another scale"),
        ({"precision_of": ("a=fp16",), "compress": "top-k"}, "fp16 may have another scale"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RunConfig(**settings)
