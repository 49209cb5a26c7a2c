from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evener.components.exact_sum.norm import exact_norm

ALONE: Any = None


def parameters(*gradients: torch.Tensor) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        made.append(nn.Parameter(torch.zeros_like(gradient)))
        made[-1].grad = gradient
    return made


def test_the_norm_has_the_same_bits_however_elements_are_grouped() -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(1001, generator=generator) * 10.0 ** (3 * torch.randn(1001, generator=generator))
    norm = exact_norm(parameters(whole), ALONE)
    torch.testing.assert_close(norm, whole.double().norm(), rtol=1e-14, atol=0)
    for _ in range(20):
        order = torch.randperm(1001, generator=generator)
        cuts = torch.randint(1001, (3,), generator=generator).sort().values.tolist()
        assert exact_norm(parameters(*torch.tensor_split(whole[order], cuts)), ALONE) == norm


def test_norms_of_nothing_of_zeros_and_of_what_is_not_finite() -> None:
    assert exact_norm(parameters(), ALONE) == 0
    assert exact_norm([nn.Parameter(torch.ones(2))], ALONE) == 0
    assert exact_norm(parameters(torch.zeros(3), torch.zeros(0)), ALONE) == 0
    assert exact_norm(parameters(torch.tensor([1.0, -torch.inf])), ALONE) == torch.inf
    assert exact_norm(parameters(torch.tensor([1.0, torch.nan])), ALONE).isnan()
    small = torch.full((4,), 1e-40)
    torch.testing.assert_close(
        exact_norm(parameters(small), ALONE), small.double().norm(), rtol=1e-14, atol=0
    )
