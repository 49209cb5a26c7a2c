"""Random numbers in the place of a model's outputs, with which a loss is tried."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn_like(leaf: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws values of the same kind on the CPU: probabilities, their logarithms, positive values, or any."""
    spread = torch.linspace(3.0, 0.3, len(leaf), dtype=torch.float64)  # makes the parts unlike
    drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
    drawn *= spread.view(-1, *[1] * (leaf.dim() - 1))
    drawn = drawn.to(leaf.device, leaf.dtype)
    if leaf.dim() > 1 and bool((leaf >= 0).all()) and bool(((leaf.sum(-1) - 1).abs() < 1e-3).all()):
        return drawn.softmax(-1)
    if bool((leaf <= 0).all()) and leaf.dim() > 1:
        return drawn.log_softmax(-1)
    if bool((leaf >= 0).all()):
        return drawn.sigmoid() if bool((leaf <= 1).all()) else drawn.exp()
    return drawn
