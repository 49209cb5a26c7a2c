"""Type aliases that many modules use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

Tree: TypeAlias = Any
"""A tensor, or tuples, lists and dicts of trees. Leaves that are not tensors are passed through unchanged."""

MakeModel: TypeAlias = Callable[[], nn.Module]
MakeOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]
"""Maps a list of parameters to an optimizer. If the function asks for them by name, it gets pairs of names and
parameters, or the model, instead."""
MakeScheduler: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Forward: TypeAlias = Callable[[nn.Module, Tree], Tree]
