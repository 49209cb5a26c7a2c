"""PyTorch's own losses, taken as they are and made exact.

A loss of ``torch.nn`` returns a mean, and with it forgets over how many terms. Each can return the sum
instead, and for each the divisor of its mean is a function of the targets and the options alone. The table
below states that function, once a loss; everything else follows:

=============  ===========================  =================================================
reduction      what is back-propagated      divided by
=============  ===========================  =================================================
``mean``       sum of the terms             the table's divisor, over the global batch
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
from evener.torch_internals.version import version

Options = Mapping[str, Any]


def _elements(targets: Tensor, options: Options) -> Number:
    return targets.numel()


def _rows(targets: Tensor, options: Options) -> Number:
    """Losses that sum over the last dimension: one term for each index of the others."""
    return math.prod(targets.shape[:-1])


def _positions(targets: Tensor, options: Options) -> Number:
    """Elements of cross entropy's unreduced loss: targets are indices (N, ...) or probabilities (N, C,
    ...).
    """
    if not targets.is_floating_point():
        return targets.numel()
    return math.prod(targets.shape) // max(1, targets.shape[min(1, targets.dim() - 1)])


def _class_weights(targets: Tensor, options: Options) -> Number:
    """The weights of the targets that are not ignored; for probabilities, as PyTorch has it, their plain
    number.
    """
    if targets.is_floating_point():
        return _positions(targets, options)
    ignored, weight = options.get("ignore_index", -100), options.get("weight")
    if weight is None and ignored < 0 and _has_all(targets):
        return targets.numel()
    kept: Tensor = targets != ignored
    terms: Tensor = kept if weight is None else weight.double()[targets.long().where(kept, 0)] * kept
    return terms.sum()


def _has_all(targets: Tensor) -> bool:
    """Whether none is negative, where the host can see that: in a quarter of the time of a count."""
    if type(targets) is not Tensor or targets.device.type != "cpu" or not targets.numel():
        return False
    return targets.min().item() >= 0


@dataclass(frozen=True)
class _Form:
    """In what way one of torch's functions is a sum.

    Attributes:
        options: The keyword arguments that leave it one. Those in ``_TENSORS`` hold tensors.
        terms: The divisor of its mean.
        elements: The number of elements with ``reduction="none"``.
        alike: Outputs and targets must be of one shape; PyTorch would broadcast them in silence or with a
            warning.
    """

    options: tuple[str, ...] = ()
    terms: Callable[[Tensor, Options], Number] = _elements
    elements: Callable[[Tensor, Options], Number] = _elements
    alike: bool = True
    reductions: tuple[str, ...] = ("mean", "sum", "none")


_TENSORS = ("weight", "pos_weight")

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
    """The loss as a sum with a count, whatever way it was given.

    Args:
        loss: A :class:`Loss` or an object with its ``count`` and ``total``; a loss module of ``torch.nn``, a
            loss function of ``torch.nn.functional``, or a ``functools.partial`` that sets the function's
            options by name.

    Raises:
        LossError: For anything else, with the lines that turn it into one.
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
    """Whether the object has the two methods of a :class:`Loss`."""
    return callable(getattr(loss, "count", None)) and callable(getattr(loss, "total", None))


def is_torch_loss(loss: Any) -> bool:
    """Whether the object is one of PyTorch's losses that can be made exact, or a partial of one."""
    return _parts(loss)[0] in _FORMS


class TorchLoss(Loss):
    """One of ``torch.nn.functional``'s losses with its options fixed."""

    def __init__(self, function: Callable[..., Tensor], options: Options) -> None:
        self._function = function
        self._form = _FORMS[function]
        self._options = {name: value for name, value in options.items() if name != "reduction"}
        self._reduction = options.get("reduction", "mean")
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
        # A sum over a batch overflows float16 and drowns in bfloat16 where the mean would not.
        if outputs.dtype is not torch.float32:
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if targets.is_floating_point():
            targets = targets.to(torch.promote_types(targets.dtype, outputs.dtype))
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
        """The option; a tensor on that device and of at least that precision, copied there only once."""
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
        """A weight that broadcasts against the targets may not have an entry for each sample."""
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


class _Adapted(Loss):
    """An object of the user's with ``count`` and ``total``, and perhaps ``divisor``."""

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
    """The function behind a loss and the options set; only exact types, as a subclass may compute something
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
