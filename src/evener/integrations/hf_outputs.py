"""Models that take and return dictionaries, as those of Hugging Face: two lines of a task.

::

    Task(..., forward=logits, loss=token_loss())                a word for each place: masked models, tags
    Task(..., forward=logits, loss=token_loss(causal=True))     the next word: causal models

A model's own ``outputs.loss`` is a mean over what one rank has seen. The mean over all ranks cannot be had from it
unless their counts are equal, so the model is called without labels and the sum is computed here.
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
    """The ``logits`` of a model that returns an object or a mapping with them; for ``Task(forward=...)``.

    Raises:
        LossError: If there are none.
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
    """Cross entropy, a mean over the labels of all ranks that are not ``ignore_index``.

    Args:
        causal: Each place is compared with the label of the next, and the first label with none.
        ignore_index: The label of places that do not count.
        label_smoothing: Part of each label that goes to all words alike, as of ``nn.CrossEntropyLoss``.
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
