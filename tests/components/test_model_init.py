"""The model of a rank, as it is built."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.model_init import build_model, build_on_meta, holds_the_same, settle_on
from evener.core.config.run_config import RunConfig
from evener.data.batch import Batch
from evener.distributed.environment import Environment
from evener.distributed.signals import raising
from evener.errors import ConfigurationError, InterruptedRunError, TaskError
from evener.tools.verify import record
from evener.tools.verify.comparison import RunDistance
from evener.tools.verify.rounding_floor import ComparedPlace, PlaceKind
from evener.training.engine import Engine
from tests import tasks


def with_numbers() -> nn.Module:
    model = nn.Linear(6, 3)
    float(model.weight.sum())
    return model


def with_a_tensor_beside() -> nn.Module:
    """``weight``, computed from ``weight_orig`` in each forward pass, is neither parameter nor buffer."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 3)))


def interrupted() -> nn.Module:
    signal.raise_signal(signal.SIGTERM)
    return nn.Linear(6, 3)


def test_a_model_that_computes_with_numbers_is_built_for_real() -> None:
    assert build_on_meta(tasks._task(model=with_numbers), 0) is None
    assert build_on_meta(tasks._task(model=with_a_tensor_beside), 0) is None
    built = build_on_meta(tasks.plain(), 0)
    assert built is not None
    assert {p.device for p in built.parameters()} == {torch.device("meta")}


def orthogonal() -> nn.Module:
    """A buffer of the parametrization stays None on the meta device, where no error says so."""
    return nn.Sequential(nn.Linear(6, 6), nn.utils.parametrizations.orthogonal(nn.Linear(6, 3)))


def test_a_model_that_comes_out_otherwise_on_meta_is_found() -> None:
    task = tasks._task(model=orthogonal)
    on_meta = build_on_meta(task, 0)
    assert on_meta is not None
    assert not holds_the_same(on_meta, build_model(task, 0))
    again = build_on_meta(tasks.plain(), 0)
    assert again is not None
    assert holds_the_same(again, build_model(tasks.plain(), 0))


def orthogonal_task() -> tasks.Task:
    return tasks._task(model=orthogonal)


def last_loss(strategy: str) -> float:
    with Engine(orthogonal_task(), device="cpu", dtype="float64", strategy=strategy, steps=2) as engine:
        return [engine.step(batch).loss for batch in engine.batches()][-1]


def test_it_is_divided_as_it_comes_out_on_the_first_rank(ranks: Any) -> None:
    assert ranks(2).run(last_loss, "sharded") == pytest.approx([last_loss("single")] * 2, rel=1e-11)


class Spectral(nn.Module):
    """Complex weights, as of Fourier neural operators, and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.tied = self.weight
        self.inner = nn.Linear(4, 3)
        self.register_buffer("phase", torch.full((3,), 1 + 2j))

    def forward(self, x: Tensor) -> Tensor:
        return (self.phase * (torch.fft.fft(x) @ self.weight)).abs() + self.inner(x)


@pytest.mark.parametrize(
    ("dtype", "complex_dtype"), [(torch.float64, torch.complex128), (torch.float32, torch.complex64)]
)
def test_complex_weights_keep_their_imaginary_parts(dtype: torch.dtype, complex_dtype: torch.dtype) -> None:
    model = Spectral()
    before, parameter = model.weight.detach().clone(), model.weight
    settle_on(model, torch.device("cpu"), dtype)
    assert model.weight is model.tied is parameter
    assert torch.equal(model.weight.detach(), before.to(complex_dtype))
    assert model.get_buffer("phase").tolist() == [1 + 2j] * 3
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {dtype, complex_dtype}


def test_there_are_no_complex_numbers_of_every_type() -> None:
    with pytest.raises(ConfigurationError, match="no complex numbers in bfloat16"):
        settle_on(Spectral(), torch.device("cpu"), torch.bfloat16)


def spectral() -> tasks.Task:
    return tasks._task(model=lambda: nn.Sequential(nn.Linear(6, 4), Spectral()))


def wrong_imaginary_parts(engine: Engine) -> Iterator[Batch]:
    with torch.no_grad():
        engine.model[1].weight.imag.mul_(1 + 1e-6)  # type: ignore[index, union-attr]
    return engine.batches()


def test_complex_weights_are_compared_whole() -> None:
    config = RunConfig(device="cpu", dtype="float64", steps=2, strategy="single")
    right = record(spectral, None, config, Environment())
    wrong = record(spectral, None, config, Environment(), wrong_imaginary_parts)
    errors = RunDistance.from_runs(right, wrong)
    assert right.weights["1.weight"].shape == (4, 3, 2)
    assert errors.weight_errors["1.weight"] > 1e-8
    assert errors.numbers[ComparedPlace(0, PlaceKind.GRADIENT, "1.weight")] > 1e-10


def test_a_signal_says_nothing_of_the_model() -> None:
    with (
        pytest.raises(InterruptedRunError),
        raising([signal.SIGTERM], lambda: "the start"),
    ):
        build_on_meta(tasks._task(model=interrupted), 0)


def test_a_model_whose_shapes_are_not_known_is_refused_by_name() -> None:
    lazy = tasks._task(model=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
    with pytest.raises(TaskError, match="1 is a LazyLinear that has seen no input yet"):
        build_model(lazy, 0)
