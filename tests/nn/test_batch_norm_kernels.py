from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evener.nn.batch_norm_kernels import Given, moments, wide

EPS = 1e-5


def laid(x: Tensor, how: str) -> Tensor:
    if how == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(2, 3).contiguous().transpose(2, 3) if how == "strided" else x


INPUTS = {
    "(n, c)": ((50, 7), ""),
    "(n, c, l)": ((9, 7, 11), ""),
    "images": ((24, 16, 40, 40), ""),
    "small images": ((40, 128, 4, 4), ""),
    "channels last": ((24, 16, 40, 40), "channels_last"),
    "strided": ((3, 4, 5, 6), "strided"),
    "volumes": ((2, 3, 4, 5, 6), ""),
    "one value": ((1, 5, 1, 1), ""),
}


def drawn(name: str, dtype: torch.dtype, mean: float = 3.0, std: float = 2.0) -> Tensor:
    shape, how = INPUTS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return laid((mean + std * x).to(dtype), how)


def of_float64(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, M2 and output of what ``x`` holds exactly."""
    exact = x.double()
    others = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(exact, others, correction=0, keepdim=True)
    output = (exact - mean) / torch.sqrt(variance + EPS)
    return mean.flatten(), variance.flatten() * (x.numel() // x.shape[1]), output


def given(x: Tensor, weight: Tensor | None = None) -> Given:
    mean, squares = moments(x)
    return Given(wide(x.dtype), mean, squares / (x.numel() // x.shape[1]), EPS, weight)


def as_tensors(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, squares = moments(x)
    return torch.as_tensor(mean), torch.as_tensor(squares)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 5e-7), (torch.float16, 5e-7), (torch.bfloat16, 5e-7)],
)
def test_moments_are_those_of_float64(name: str, dtype: torch.dtype, tolerance: float) -> None:
    x = drawn(name, dtype)
    mean, squares = as_tensors(x)
    expected_mean, expected_squares, _ = of_float64(x)
    torch.testing.assert_close(mean, expected_mean, rtol=tolerance, atol=1e-12)
    torch.testing.assert_close(squares, expected_squares, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("name", ["(n, c)", "images", "small images", "channels last", "volumes"])
def test_a_large_mean_costs_no_digits(name: str) -> None:
    """torch's own BatchNorm has the output wrong by 0.06 here, and ``torch.var_mean`` of float32 has the mean of images
    wrong by 1e-4, a hundredth of the deviation."""
    x = drawn(name, torch.float32, mean=1e4, std=1e-2)
    mean, squares = as_tensors(x)
    expected_mean, expected_squares, expected = of_float64(x)
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(squares, expected_squares, rtol=1e-6, atol=0)
    torch.testing.assert_close(given(x).normalize(x, None).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(INPUTS)[:-1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05)]
)
def test_the_gradient_is_that_of_autograd(name: str, dtype: torch.dtype, tolerance: float) -> None:
    x = drawn(name, dtype)
    n, channels = x.numel() // x.shape[1], x.shape[1]
    weight = torch.linspace(0.5, 2, channels).to(dtype)
    dy = laid(torch.randn(x.shape, dtype=torch.float64).to(dtype), INPUTS[name][1])
    exact = x.double().clone().requires_grad_()
    _, _, xhat = of_float64(exact)
    (expected,) = torch.autograd.grad(
        xhat * weight.double().view(-1, *[1] * (x.dim() - 2)), exact, dy.double()
    )
    statistics = given(x, weight)
    sums = statistics.sums(dy, x)
    dx = statistics.direct(dy, x)
    statistics.through_statistics(dx, x, sums, n)
    assert dx.dtype == dtype
    assert dx.stride() == x.stride()
    torch.testing.assert_close(dx.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_gradient_of_any_strides() -> None:
    x = drawn("channels last", torch.float64)
    statistics, dy = given(x), torch.ones((), dtype=torch.float64).expand(x.shape)
    dx = statistics.direct(dy, x)
    statistics.through_statistics(dx, x, statistics.sums(dy, x), x.numel() // x.shape[1])
    assert float(dx.abs().max()) < 1e-12, "what is added to all samples alike, a normalization takes away"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_kernels_of_other_devices_compute_the_same(monkeypatch: Any, dtype: torch.dtype) -> None:
    """Their paths, on a CPU: all that they ask of the device is its type."""
    x, weight = drawn("images", dtype), torch.linspace(0.5, 2, 16)
    dy, bias = torch.randn(x.shape).to(dtype), torch.linspace(-1, 1, 16)

    def all_of_it() -> list[Tensor]:
        statistics = given(x, weight)
        y, dx = statistics.normalize(x, bias), statistics.direct(dy, x)
        statistics.through_statistics(dx, x, statistics.sums(dy, x), 38400)
        return [*as_tensors(x), y, dx]

    here = all_of_it()
    monkeypatch.setattr("evener.nn.batch_norm_kernels._by_pieces", lambda x: False)
    monkeypatch.setattr("evener.nn.batch_norm_kernels.light", lambda of_channels: of_channels)
    tolerance = 5e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(all_of_it(), here, rtol=tolerance, atol=tolerance)
