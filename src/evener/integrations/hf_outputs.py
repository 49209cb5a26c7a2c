"""Forward function and loss for models that take and return dictionaries, such as those of Hugging Face.

::

    Task(..., forward=logits, loss=token_loss())                one label per token: masked models, tagging
    Task(..., forward=logits, loss=token_loss(causal=True))     next-token prediction: causal models

A model's own ``outputs.loss`` is a mean over the samples of one rank. The mean over all ranks cannot be computed from
these means unless the counts of all ranks are equal. So the model is called without labels, and the loss is summed
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.core.losses import Loss
from evener.core.plugins import kind_of
from evener.core.task.task import call_model
from evener.errors import LossError


def logits(model: nn.Module, inputs: Any) -> Tensor:
    """Calls the model and returns the ``logits`` of its output, an object or a mapping; for ``Task(forward=...)``.

    Raises:
        LossError: If the output has no tensor ``logits``.
    """
    outputs: Any = call_model(model, inputs)
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise LossError(
            f"the model returned {kind_of(outputs)} without a tensor `logits`; choose the output that the loss takes "
            "with forward=lambda model, inputs: evener.call_model(model, inputs)[...]"
        )
    return found


def token_loss(causal: bool = False, ignore_index: int = -100, label_smoothing: float = 0.0) -> Loss:
    """Returns cross entropy, averaged over the labels of all ranks that are not ``ignore_index``.

    Args:
        causal: Compares the logits at each position with the label of the next position. The first label is not used.
        ignore_index: Label of the positions that are left out.
        label_smoothing: Part of each label that is spread evenly over all classes, as in ``nn.CrossEntropyLoss``.
    """
    return _TokenLoss(causal, ignore_index, label_smoothing)


class _TokenLoss(Loss):
    def __init__(self, causal: bool, ignore_index: int, label_smoothing: float) -> None:
        self.causal, self.ignore_index, self.label_smoothing = causal, ignore_index, label_smoothing

    def count(self, targets: Any) -> Tensor:
        return (self._compared(_labels(targets)) != self.ignore_index).sum()

    def total(self, outputs: Any, targets: Any) -> Tensor:
        labels = _labels(targets)
        if outputs.shape[:-1] != labels.shape:
            raise LossError(
                f"logits of shape {tuple(outputs.shape)} do not go with labels of shape {tuple(labels.shape)}: "
                "token_loss compares one label for each place"
            )
        scores = outputs[:, :-1] if self.causal else outputs
        flat, wanted = scores.flatten(0, -2), self._compared(labels).flatten()
        return F.cross_entropy(
            flat,
            wanted,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def _compared(self, labels: Tensor) -> Tensor:
        return labels[:, 1:] if self.causal else labels


def _labels(targets: Any) -> Tensor:
    if not isinstance(targets, Tensor) or targets.dtype != torch.long:
        found = f"a tensor of {targets.dtype}" if isinstance(targets, Tensor) else kind_of(targets)
        raise LossError(f"token_loss takes labels that are a tensor of torch.int64, not {found}")
    return targets
