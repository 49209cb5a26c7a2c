"""Tensors that ranks have of their own: any number that differs is seen, and rounding is not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from evener.training.consistency.task_description import TensorSketch
from tests.tiers import ALWAYS, NIGHTLY, crossed

SIZES = (3, 16, 17, 1000, 50_000, 300_000)


def sketch(tensor: Tensor) -> TensorSketch:
    """As another rank gets it."""
    found: TensorSketch = pickle.loads(pickle.dumps(TensorSketch.of_tensor(tensor)))
    return found


def draws(size: int, seed: int = 0) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def changed(tensor: Tensor, at: int, value: Any) -> Tensor:
    found = tensor.clone()
    found[at] = value
    return found


def are_equal(first: Tensor, second: Tensor) -> bool:
    one, other = sketch(first), sketch(second)
    assert (one == other) is (other == one)
    return one == other


@pytest.mark.parametrize(
    ("tensor", "at", "value"),
    [
        (torch.ones(16), 7, 1.004),
        (torch.ones(1000), 7, 1.004),
        (draws(50_000), 7, draws(50_000)[7] + 0.2),
        (draws(100_000), 7, 5.0),
        (draws(100_000), 99_999, 5.0),
        (draws(1000).double(), 7, float("nan")),
        (torch.full((1000,), float("inf")), 7, -float("inf")),
        (torch.arange(100_000), 77_777, 77_778),
        (torch.ones(3000, dtype=torch.bool), 2999, False),
        (draws(5000).bfloat16(), 7, 2.0),
        (torch.complex(draws(5000), draws(5000, 1)), 7, 1j),
    ],
    ids=lambda each: f"{each.dtype} {len(each)}" if isinstance(each, Tensor) and each.dim() else None,
)
def test_one_number_that_differs_is_seen(tensor: Tensor, at: int, value: Any) -> None:
    assert are_equal(tensor, tensor.clone())
    assert not are_equal(tensor, changed(tensor, at, value))


def test_numbers_that_changed_places_are_seen() -> None:
    tensor = draws(100_000)
    order = torch.arange(100_000)
    order[[7, 8]] = order[[8, 7]]
    assert not are_equal(tensor, tensor[order])


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("dtype", "size"), crossed(DTYPES, SIZES, lambda _: (ALWAYS, NIGHTLY, ALWAYS, NIGHTLY, NIGHTLY))
)
def test_last_bits_may_differ_wherever_a_border_of_rounding_lies(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, generator=generator, dtype=torch.complex64 if dtype.is_complex else None)
    noise = torch.randn(size, generator=generator)
    for own in (
        numbers,
        numbers * torch.logspace(-4, 2, size),
        numbers - numbers.mean(),
        numbers.abs() * 0 + 1,
    ):
        for other in (own * (1 + 2e-7 * noise), own * (1 + 3e-7), own * (1 - 3e-7)):
            assert are_equal(own.to(dtype), other.to(dtype))


def test_forms_differ_and_what_has_no_numbers_is_its_form() -> None:
    assert not are_equal(torch.ones(40), torch.ones(4, 10))
    assert not are_equal(torch.ones(40), torch.ones(40).double())
    for form in (torch.zeros(0), torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.tensor(1.0)):
        assert sketch(form) == sketch(form)
    assert are_equal(torch.ones(5).expand(40, 5), torch.ones(40, 5))


def test_a_sketch_is_small() -> None:
    assert len(pickle.dumps(TensorSketch.of_tensor(draws(1_000_000)))) < 32_000
