"""The model and its loss as one module."""

from __future__ import annotations

from torch import Tensor, nn

from evener.data.batch import MicroBatch
from evener.errors import LossError
from evener.losses import Loss
from evener.nn.attending import attending
from evener.types import Forward, Tree


class Replica(nn.Module):
    """The model and its loss as one module: from a micro-batch to the sum of its terms.

    That the loss is inside lets a placeholder run through every module and hook like any sample, and count for
    nothing.
    """

    def __init__(self, model: nn.Module, loss: Loss, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._forward = forward

    def forward(self, micro: MicroBatch) -> Tensor:
        with attending(micro.sequence):
            outputs = self._forward(self.model, micro.inputs)
        return term_of(self._loss, outputs, micro)


def term_of(loss: Loss, outputs: Tree, micro: MicroBatch) -> Tensor:
    """The sum of the terms of a micro-batch, 0 times it for a placeholder.

    Raises:
        LossError: If it is not one number.
    """
    total = loss.total(outputs, micro.targets)
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise LossError(f"the loss's total is {shape}; it must be one number, the sum over the samples")
    return total if micro.weight else total * 0
