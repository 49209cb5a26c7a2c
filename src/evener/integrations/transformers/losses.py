"""Finds the loss of a model of ``transformers`` by its class name and config, as a sum and a count."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.core.losses import Loss
from evener.errors import ConfigurationError, LossError
from evener.integrations.hf_outputs import token_loss
from evener.integrations.transformers.router_loss import balanced

_OF_TOKENS = {
    "ForCausalLM": True,
    "LMHeadModel": True,
    "ForMaskedLM": False,
    "ForTokenClassification": False,
    "ForConditionalGeneration": False,
}
"""Suffixes of model class names. True for next-token prediction, False if each position has its own label."""
_ROUNDING = 1e-5
"""Relative tolerance for float32 sums over the labels of a batch. About 1e-7 was measured."""
_OF_SAMPLES = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")
_REGRESSION, _ONE_LABEL, _MANY_LABELS = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)


def loss_of(model: nn.Module, label_smoothing: float = 0.0) -> Loss:
    """Returns the model's own loss as a sum over terms. Labels are smoothed as ``transformers.Trainer`` does.

    Raises:
        ConfigurationError: If the model's class does not determine the loss, or its labels cannot be smoothed.
    """
    kind = type(model).__name__
    for ending, causal in _OF_TOKENS.items():
        if kind.endswith(ending):
            tokens = token_loss(causal=causal, label_smoothing=label_smoothing)
            return balanced(model, tokens, smoothed=bool(label_smoothing))
    config: Any = getattr(model, "config", None)
    if kind.endswith("ForMultipleChoice"):
        return SampleLoss(_ONE_LABEL, label_smoothing)
    if kind.endswith(_OF_SAMPLES):
        problem = config.problem_type or (_REGRESSION if config.num_labels == 1 else None)
        if label_smoothing and problem in (_REGRESSION, _MANY_LABELS):
            raise ConfigurationError(
                f"label_smoothing_factor={label_smoothing} smooths labels that are classes, and those of {kind} are "
                f"for {problem}: leave it out"
            )
        return SampleLoss(problem, label_smoothing)
    raise ConfigurationError(
        f"what {kind}'s loss is a mean over is not known: give Trainer(loss=...) from logits and labels, such as "
        "nn.CrossEntropyLoss() for one label for each sample"
    )


class SampleLoss(Loss):
    """Loss of models that give one answer per sample.

    Args:
        problem: As ``config.problem_type``: ``regression`` is the mean squared error, ``single_label_classification``
            cross entropy, ``multi_label_classification`` binary cross entropy of each label. None chooses between the
            last two: floating-point labels mean ``multi_label_classification``.
        label_smoothing: Part of each label that is spread evenly over all classes.
    """

    def __init__(self, problem: str | None, label_smoothing: float = 0.0) -> None:
        self._problem, self._label_smoothing = problem, label_smoothing

    def count(self, targets: Any) -> Tensor | float:
        labels = _labels(targets)
        return (labels != -100).sum() if self._of(labels) == _ONE_LABEL else float(labels.numel())

    def total(self, outputs: Any, targets: Any) -> Tensor:
        labels = _labels(targets)
        problem = self._of(labels)
        if problem == _ONE_LABEL:
            return F.cross_entropy(
                outputs,
                labels.flatten(),
                ignore_index=-100,
                reduction="sum",
                label_smoothing=self._label_smoothing,
            )
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


def check_own_loss(
    model: nn.Module, loss: Loss, forward: Callable[[nn.Module, Any], Any], inputs: Any, labels: Tensor
) -> None:
    """Compares the model's own loss of a batch with the loss that is trained on, in evaluation and in training mode.

    Both are computed by the same operations up to the last sum, so that only rounding may differ. Both draw the same
    random numbers. The check uses a copy of the model, for two reasons: a forward pass in training mode may change
    buffers, and ``transformers`` adds hooks that keep a model from being sent to another process.

    Raises:
        ConfigurationError: If the model's own loss differs: it has further terms, which would be left out.
    """
    model = copy.deepcopy(model)
    device = next(model.parameters()).device
    inputs, labels = {name: value.to(device) for name, value in inputs.items()}, labels.to(device)
    terms = float(loss.count(labels))
    for training in (False, True) if terms else ():
        model.train(training)
        own = _drawn_alike(lambda: model(**inputs, labels=labels).loss)
        total = _drawn_alike(lambda: loss.total(_widened(forward(model, inputs)), labels))
        if not math.isclose(own, total / terms, rel_tol=_ROUNDING):
            raise ConfigurationError(
                f"{type(model).__name__}'s own loss of the first {len(labels)} samples is {own:.8g}"
                f"{' in training' * training}, and the mean over their labels is {total / terms:.8g}: it has other "
                "terms; give Trainer(loss=...)"
            )


def _drawn_alike(compute: Callable[[], Tensor]) -> float:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return float(compute())


def _widened(outputs: Any) -> Any:
    """Casts logits of half precision to float32, in which models of ``transformers`` compute their loss."""
    if isinstance(outputs, dict):
        return {**outputs, "logits": _widened(outputs["logits"])}
    return outputs.float() if outputs.itemsize == 2 else outputs
