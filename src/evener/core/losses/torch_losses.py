"""Converts PyTorch's own losses to sums with a count.

A loss of ``torch.nn`` returns a mean, from which the number of terms is not known. Each loss can return the sum
instead, and the divisor of its mean is a function of the targets and the options only. The table ``_FORMS`` states
this function for each loss; the rest follows from it:

=============  ===========================  =================================================
reduction      what is back-propagated      divided by
=============  ===========================  =================================================
``mean``       sum of the terms             the divisor in ``_FORMS``, over the global batch
``batchmean``  sum of the terms             the number of samples
``none``       sum of the terms             the number of elements, as by a ``.mean()`` after
``sum``        sum of the terms             1
=============  ===========================  =================================================

Divisors follow ``aten/src/ATen/native/Loss*.cpp`` and ``torch/nn/functional.py``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.core.losses.sums import Loss, Number
from evener.core.losses.type_checks import check_outputs, check_targets
from evener.errors import LossError
from evener.torch_internals.autograd import version

Options = Mapping[str, Any]


def _elements(targets: Tensor, options: Options) -> Number:
    return targets.numel()


def _rows(targets: Tensor, options: Options) -> Number:
    """Returns the number of terms of losses that reduce the last dimension: one for each index of the others."""
    return math.prod(targets.shape[:-1])


def _positions(targets: Tensor, options: Options) -> Number:
    """Returns the number of elements of the unreduced cross entropy. Targets are indices (N, ...) or probabilities
    (N, C, ...).
    """
    if not targets.is_floating_point():
        return targets.numel()
    return math.prod(targets.shape) // max(1, targets.shape[min(1, targets.dim() - 1)])


def _class_weights(targets: Tensor, options: Options) -> Number:
    """Returns the sum of the class weights of the targets that are not ignored. For probabilities it returns their
    number, as PyTorch does.
    """
    if targets.is_floating_point():
        return _positions(targets, options)
    ignored, weight = options.get("ignore_index", -100), options.get("weight")
    if weight is None and ignored < 0 and _has_all(targets):
        return targets.numel()
    kept: Tensor = targets != ignored
    terms: Tensor = kept if weight is None else weight.double()[targets.long().where(kept, 0)] * kept
    return terms.sum()


_FEW = 64
"""Number of targets up to which Python finds the smallest one sooner than PyTorch."""


def _has_all(targets: Tensor) -> bool:
    """Returns True if no target is negative. Looks at CPU tensors only (False for others): this takes a quarter of the
    time of counting the targets that are not ignored.
    """
    if type(targets) is not Tensor or not targets.is_cpu or not targets.numel():
        return False
    if targets.dim() == 1 and len(targets) <= _FEW:
        return bool(min(targets.tolist()) >= 0)
    return targets.min().item() >= 0


@dataclass(frozen=True)
class _Form:
    """Describes how a loss function of PyTorch is a sum of terms.

    Attributes:
        options: The keyword arguments with which it remains a sum. Those in ``_TENSORS`` hold tensors.
        terms: The divisor of its mean.
        elements: The number of elements with ``reduction="none"``.
        alike: Outputs and targets must have the same shape; PyTorch would broadcast them silently or with a warning.
        reductions: The supported values of ``reduction``.
    """

    options: tuple[str, ...] = ()
    terms: Callable[[Tensor, Options], Number] = _elements
    elements: Callable[[Tensor, Options], Number] = _elements
    alike: bool = True
    reductions: tuple[str, ...] = ("mean", "sum", "none")


_TENSORS = ("weight", "pos_weight")
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
"""These take scores of classes in dimension 1, and indices of classes."""

_FORMS: dict[Callable[..., Tensor], _Form] = {
    F.cross_entropy: _Form(
        ("weight", "ignore_index", "label_smoothing"), _class_weights, _positions, alike=False
    ),
    F.nll_loss: _Form(("weight", "ignore_index"), _class_weights, alike=False),
    F.mse_loss: _Form(),
    F.l1_loss: _Form(),
    F.smooth_l1_loss: _Form(("beta",)),
    F.huber_loss: _Form(("delta",)),
    F.binary_cross_entropy: _Form(("weight",)),
    F.binary_cross_entropy_with_logits: _Form(("weight", "pos_weight")),
    F.kl_div: _Form(("log_target",), reductions=("mean", "sum", "none", "batchmean")),
    F.poisson_nll_loss: _Form(("log_input", "full", "eps")),
    F.soft_margin_loss: _Form(),
    F.hinge_embedding_loss: _Form(("margin",)),
    F.multilabel_soft_margin_loss: _Form(("weight",), _rows, _rows),
    F.multilabel_margin_loss: _Form((), _rows, _rows),
    F.multi_margin_loss: _Form(("p", "margin", "weight"), alike=False),
}

_FUNCTIONS: dict[type, Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiMarginLoss: F.multi_margin_loss,
}


def exact(loss: Any) -> Loss:
    """Converts a loss to a :class:`Loss`, a sum with a count.

    Args:
        loss: A :class:`Loss` or an object with its ``count`` and ``total``; a loss module of ``torch.nn``, a
            loss function of ``torch.nn.functional``, or a ``functools.partial`` that sets the function's
            options by name.

    Raises:
        LossError: For anything else. The message shows how to write the loss with ``evener.loss``.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        raise LossError(f"the loss is the class {loss.__name__}; pass an instance of it: {loss.__name__}()")
    if is_sum(loss):
        return _Adapted(loss)
    function, options = _parts(loss)
    if function not in _FORMS:
        raise LossError(_REFUSAL.format(name=_name(loss)))
    return TorchLoss(function, options)


def is_sum(loss: Any) -> bool:
    """Returns True if the object has the methods ``count`` and ``total`` of a :class:`Loss`."""
    return callable(getattr(loss, "count", None)) and callable(getattr(loss, "total", None))


def is_torch_loss(loss: Any) -> bool:
    """Returns True if the object is a PyTorch loss that :func:`exact` can convert, or a partial of one."""
    return _parts(loss)[0] in _FORMS


class TorchLoss(Loss):
    """A loss function of ``torch.nn.functional`` with fixed options."""

    def __init__(self, function: Callable[..., Tensor], options: Options) -> None:
        self._function = function
        self._form = _FORMS[function]
        self._options = {name: value for name, value in options.items() if name != "reduction"}
        self._reduction = options.get("reduction", "mean")
        self.is_over_elements = self._reduction in ("mean", "none") and self._form.terms is _elements
        self._is_plain = not any(isinstance(value, Tensor) for value in self._options.values())
        self._moved: dict[tuple[str, torch.device, torch.dtype], tuple[int, Tensor]] = {}
        self._validate()

    def count(self, targets: Tensor) -> Number:
        check_targets(targets, self._function.__name__)
        self._refuse_weights_of_samples(targets)
        options = self._options_on(targets.device)
        if self._reduction == "none":
            return self._form.elements(targets, options)
        if self._reduction == "batchmean":
            return targets.shape[0]
        return self._form.terms(targets, options)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_outputs(outputs, self._function.__name__)
        check_targets(targets, self._function.__name__)
        if self._form.alike and outputs.shape != targets.shape:
            raise LossError(
                f"{self._function.__name__}: outputs of shape {tuple(outputs.shape)} against targets of shape"
                f" {tuple(targets.shape)}; PyTorch would broadcast one over the other. Give both one shape,"
                " e.g. with outputs.squeeze(-1) or targets.unsqueeze(-1)"
            )
        self._refuse_weights_of_samples(targets)
        # The sum over a batch may overflow float16, and loses precision in bfloat16, where the mean would not.
        if outputs.dtype is not torch.float32:
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if targets.is_floating_point():
            targets = targets.to(torch.promote_types(targets.dtype, outputs.dtype))
        elif outputs.dim() > 2 and self._function in _OF_CLASSES:
            outputs, targets = _in_rows(outputs, targets)
        options = self._options_on(outputs.device, outputs.dtype)
        return self._function(outputs, targets, reduction="sum", **options)

    def divisor(self, global_count: float) -> float:
        return 1.0 if self._reduction == "sum" else global_count

    def __repr__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self._options.items() if value is not None)
        return f"exact({self._function.__name__}, reduction={self._reduction!r}{options})"

    def _validate(self) -> None:
        name = self._function.__name__
        if self._reduction not in self._form.reductions:
            allowed = ", ".join(self._form.reductions)
            raise LossError(f"{name}: reduction={self._reduction!r} is not one of {allowed}")
        unknown = [option for option in self._options if option not in self._form.options]
        if unknown:
            allowed = ", ".join((*self._form.options, "reduction"))
            raise LossError(
                f"{name}: cannot be divided with {', '.join(unknown)} set beforehand; it may set {allowed}"
            )

    def _options_on(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Any]:
        if self._is_plain:
            return self._options
        return {name: self._option(name, device, dtype) for name in self._options}

    def _option(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Any:
        """Returns the option. A tensor is converted to the device and to at least the given precision; the copy is
        cached until the option is changed in place.
        """
        value = self._options[name]
        if not isinstance(value, Tensor):
            return value
        dtype = torch.promote_types(value.dtype, dtype or value.dtype)
        if value.device == device and value.dtype == dtype:
            return value
        writes, moved = self._moved.get((name, device, dtype), (-1, value))
        if writes != version(value):
            moved = value.detach().to(device, dtype)
            self._moved[name, device, dtype] = (version(value), moved)
        return moved

    def _refuse_weights_of_samples(self, targets: Tensor) -> None:
        """Raises LossError if a weight that broadcasts against the targets has an entry for each sample."""
        if not self._form.alike:
            return
        for name in _TENSORS:
            weight = self._options.get(name)
            if isinstance(weight, Tensor) and weight.dim() >= targets.dim() and weight.shape[0] > 1:
                raise LossError(
                    f"{self._function.__name__}: {name} of shape {tuple(weight.shape)} varies along"
                    f" the batch of targets of shape {tuple(targets.shape)}, and cannot be divided with it."
                    " Put the samples' weights into the targets, and use evener.loss"
                )


def _in_rows(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scores (N, C, ...) and indices of classes (N, ...) with one row for each index, if the scores of an index
    lie together in memory, as those of a language model do that were transposed for the loss. The sum is the same.

    The kernels for rows are faster, on a GPU several times so: those for dimension 1 are made for images. Images keep
    theirs, because a copy would be needed, unless only deterministic algorithms are allowed: PyTorch has none for
    images on a GPU.
    """
    rows = outputs.movedim(1, -1)
    copies = torch.are_deterministic_algorithms_enabled() and not outputs.is_cpu
    fits = targets.shape == rows.shape[:-1]  # else the loss says what is wrong
    if fits and (copies or rows.is_contiguous()):
        return rows.flatten(0, -2), targets.flatten()
    return outputs, targets


class _Adapted(Loss):
    """Wraps a user-defined object that has ``count`` and ``total``, and optionally ``divisor``."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def count(self, targets: Any) -> Number:
        number: Number = self._loss.count(targets)
        return number

    def total(self, outputs: Any, targets: Any) -> Tensor:
        total: Tensor = self._loss.total(outputs, targets)
        return total

    def divisor(self, global_count: float) -> float:
        own = getattr(self._loss, "divisor", super().divisor)
        return float(own(global_count))


def _parts(loss: Any) -> tuple[Any, Options]:
    """Returns the function behind a loss and its options. Knows exact types only: a subclass may compute something
    else.
    """
    if isinstance(loss, functools.partial) and not loss.args and inspect.isfunction(loss.func):
        return loss.func, loss.keywords
    function = _FUNCTIONS.get(type(loss))
    if function:
        return function, {name: getattr(loss, name) for name in (*_FORMS[function].options, "reduction")}
    return (loss if inspect.isfunction(loss) else None), {}


def _name(loss: Any) -> str:
    if isinstance(loss, nn.Module):
        return type(loss).__name__
    return str(getattr(loss, "__qualname__", None) or repr(loss))


_REFUSAL = """\
the loss {name} cannot be divided among ranks as it is: nothing tells how many terms its mean is over.
If it is a mean over the samples of a batch, give this instead, with your loss in place of `loss`:

    evener.loss(
        total=lambda outputs, targets: len(targets) * loss(outputs, targets),
        count=lambda targets: len(targets),
    )

If it is a mean over something else (tokens, pixels), count that in both lines. If it is a sum, say so with

    evener.loss(total=loss, count="sum")

and a constant factor with scale=, as in evener.loss(torch.nn.MSELoss(), scale=0.5). A loss that compares the
samples of a batch with each other (contrastive, triplet) is no sum over samples: its value depends on which
samples meet on a rank."""
