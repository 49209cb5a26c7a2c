"""How far two sets of weights lie apart, in one number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from evener.verification import relative_error


def worst(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest relative error of any; NaN if one is, which Python's ``max`` may pass over."""
    assert reference.keys() == other.keys()
    errors = [relative_error(value, other[name]) for name, value in reference.items()]
    return torch.tensor(errors, dtype=torch.float64).max().item()
