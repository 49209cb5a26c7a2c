"""Losses and metrics as sums, so that a batch can be divided among ranks in any way.

The mean over a batch is not the mean of the means over its parts if these differ in size. Losses and metrics are
therefore kept as the sum of the terms and their number (:class:`Sum`). Both add up over micro-batches and ranks; the
mean is taken at the end.

::

    sums          Sum, Loss, SumLoss: the base classes
    torch_losses  exact(): PyTorch's own losses as sums
    user_loss     loss(): a user-defined loss in one line
    type_checks   error messages for outputs and targets that are not tensors
    metrics       one interface for metrics of Evener and of torchmetrics
"""

from __future__ import annotations

from evener.core.losses.metrics import Accumulator, Metric, accuracy, metric
from evener.core.losses.sums import Loss, Sum, SumLoss
from evener.core.losses.torch_losses import exact
from evener.core.losses.user_loss import loss

__all__ = ["Accumulator", "Loss", "Metric", "Sum", "SumLoss", "accuracy", "exact", "loss", "metric"]
