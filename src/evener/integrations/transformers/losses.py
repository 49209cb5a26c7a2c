"""What the loss of a model of ``transformers`` is a mean over, by the kind of the model and its config."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from evener.errors import ConfigurationError, LossError
from evener.integrations.dictionaries import token_loss
from evener.losses import Loss

_OF_TOKENS = {
    "ForCausalLM": True,
    "LMHeadModel": True,
    "ForMaskedLM": False,
    "ForTokenClassification": False,
    "ForConditionalGeneration": False,
}
"""Endings of the names of models, and whether each place is compared with the next label."""
_OF_SAMPLES = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")
_REGRESSION, _ONE_LABEL, _MANY_LABELS = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)


def loss_of(model: nn.Module) -> Loss:
    """The model's own loss as a sum over terms.

    Raises:
        ConfigurationError: If the kind of the model does not tell it.
    """
    kind = type(model).__name__
    for ending, causal in _OF_TOKENS.items():
        if kind.endswith(ending):
            return token_loss(causal=causal)
    config: Any = getattr(model, "config", None)
    if kind.endswith("ForMultipleChoice"):
        return SampleLoss(_ONE_LABEL)
    if kind.endswith(_OF_SAMPLES):
        return SampleLoss(config.problem_type or (_REGRESSION if config.num_labels == 1 else None))
    raise ConfigurationError(
        f"what {kind}'s loss is a mean over is not known: give Trainer(loss=...) from logits and labels, such as "
        "nn.CrossEntropyLoss() for one label for each sample"
    )


class SampleLoss(Loss):
    """Of models with one answer for each sample.

    Args:
        problem: As ``config.problem_type`` says: ``regression`` is the mean of squares, ``single_label_classification``
            cross entropy, ``multi_label_classification`` binary cross entropy of each label; None tells the last two
            apart by the type of the labels.
    """

    def __init__(self, problem: str | None) -> None:
        self._problem = problem

    def count(self, targets: Any) -> Tensor | float:
        labels = _labels(targets)
        return (labels != -100).sum() if self._of(labels) == _ONE_LABEL else float(labels.numel())

    def total(self, outputs: Any, targets: Any) -> Tensor:
        labels = _labels(targets)
        problem = self._of(labels)
        if problem == _ONE_LABEL:
            return F.cross_entropy(outputs, labels.flatten(), ignore_index=-100, reduction="sum")
        if outputs.numel() != labels.numel():
            raise LossError(
                f"logits of shape {tuple(outputs.shape)} do not go with labels of shape {tuple(labels.shape)}: the "
                f"loss of {problem} compares each logit with a label"
            )
        wanted = labels.reshape(outputs.shape).to(outputs.dtype)
        if problem == _REGRESSION:
            return F.mse_loss(outputs, wanted, reduction="sum")
        return F.binary_cross_entropy_with_logits(outputs, wanted, reduction="sum")

    def _of(self, labels: Tensor) -> str:
        return self._problem or (_MANY_LABELS if labels.is_floating_point() else _ONE_LABEL)


def _labels(targets: Any) -> Tensor:
    if not isinstance(targets, Tensor):
        raise LossError(
            f"labels are {type(targets).__name__}, not a tensor; let the collator make one of them"
        )
    return targets
