"""The model and its loss as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evener.components.loss_trial import LossTrial
from evener.core.losses import Loss
from evener.core.types import Forward, Tree
from evener.data.batch import MicroBatch, map_leaves
from evener.errors import LossError
from evener.nn.attention_dispatch import attending


class Replica(nn.Module):
    """The model and its loss as one module: maps a micro-batch to its summed loss.

    Because the loss is inside the module, a placeholder runs through every module and hook like any sample, and then
    counts for nothing.
    """

    def __init__(self, model: nn.Module, loss: Loss, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._trial = LossTrial(loss)
        self._forward = forward

    def forward(self, micro: MicroBatch) -> Tensor:
        if micro.sequence is None:
            outputs = self._forward(self.model, micro.inputs)
        else:
            with attending(micro.sequence):
                outputs = self._forward(self.model, micro.inputs)
        if not (torch.compiler.is_compiling() or self._trial.is_done):
            self._trial.run(outputs, micro)
        return term_of(self._loss, outputs, micro)


def term_of(loss: Loss, outputs: Tree, micro: MicroBatch) -> Tensor:
    """Returns the summed loss of a micro-batch. For a placeholder, the loss and the gradient of the outputs are 0.

    They are 0 even if the placeholder's own loss or gradient is infinite or NaN. (Multiplying by 0 would give NaN.)

    Raises:
        LossError: If the loss is not a single number.
    """
    if not micro.weight:
        outputs = map_leaves(_without_gradient, outputs)
    total = loss.total(outputs, micro.targets)
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise LossError(f"the loss's total is {shape}; it must be one number, the sum over the samples")
    return total if micro.weight else torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0)


def _without_gradient(leaf: Any) -> Any:
    """Makes the gradient of an output zero. Backward still runs through all modules."""
    if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
        leaf.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return leaf
