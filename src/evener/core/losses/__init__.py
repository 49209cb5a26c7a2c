"""Losses and metrics as sums: the one form in which a batch may be divided among ranks in any way.

A mean over a batch is not the mean of the means over its parts, so no value here is a mean until the end.
What is passed around is the sum of the terms and their number (:class:`Sum`), both of which add up over
micro-batches and ranks.

::

    sums          Sum, Loss, SumLoss: the words
    torch_losses  PyTorch's own losses, made exact
    own           loss(): one of your own, said in a line
    kinds         what is told of outputs and targets that are no tensors
    metrics       metrics, ours and torchmetrics', behind one interface
"""

from __future__ import annotations

from evener.core.losses.metrics import Accumulator, Metric, accuracy, metric
from evener.core.losses.sums import Loss, Sum, SumLoss
from evener.core.losses.torch_losses import exact
from evener.core.losses.user_loss import loss

__all__ = ["Accumulator", "Loss", "Metric", "Sum", "SumLoss", "accuracy", "exact", "loss", "metric"]
