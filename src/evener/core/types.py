"""Names for the types that many modules speak of, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

Tree: TypeAlias = Any
"""A tensor, or tuples, lists and dicts of trees; leaves that are no tensors pass through untouched."""

MakeModel: TypeAlias = Callable[[], nn.Module]
MakeOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]
"""From a list of parameters; of pairs of names and parameters, or from the model, where it asks for these."""
MakeScheduler: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Forward: TypeAlias = Callable[[nn.Module, Tree], Tree]
