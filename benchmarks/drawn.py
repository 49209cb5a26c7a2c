"""Numbers that are the same in every process: ranks that hold other data behind the same numbers do not train."""

from __future__ import annotations

import torch
from torch import Tensor


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    """As ``torch.rand``."""
    return torch.rand(shape, generator=_generator())


def randn(*shape: int) -> Tensor:
    """As ``torch.randn``."""
    return torch.randn(shape, generator=_generator())


def randint(high: int, shape: tuple[int, ...]) -> Tensor:
    """As ``torch.randint``."""
    return torch.randint(high, shape, generator=_generator())
