"""Tensors of this rank's samples, whose sums are taken over the samples of all ranks.

A loss function is written for one device: ``(each * mask).sum() / mask.sum()``. With tensors of this class it works
unchanged on several ranks. Results computed from them are again of this rank's samples. A sum, a mean or a PyTorch loss
over all elements becomes that of all ranks::

    outputs, targets  ──▶  each = (outputs - targets) ** 2  ──▶  (each * mask).sum()  ──▶  a plain number, everybody's
        Own                            Own                          joined

So token means, masked means, sums of several losses, the root of a mean and a Dice coefficient are what one device
computes, with exact counts. A function that compares samples with each other (a similarity matrix, ``max`` with a
gradient) is not made of such sums; :mod:`evener.training.prepare.loss_kind` finds that out before the result is used.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from evener.core.losses.torch_losses import exact
from evener.data.batch import leaves_of, map_leaves

Kind = Literal["sum", "max", "min"]


class NotSums(BaseException):
    """Raised if a function reads single numbers of its samples, which differ between ranks."""


class Joint(ABC):
    """Combines numbers over the samples of all ranks."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Names of the torch functions that were called."""

    @abstractmethod
    def join(
        self, total: Tensor, count: Any, divisor: Callable[[float], float], sizes: Sequence[int] = ()
    ) -> Tensor:
        """Returns the sum of the totals of all ranks, divided by the divisor for the sum of their counts.

        Args:
            sizes: Sizes of the tensors behind the total, on this rank.
        """

    @abstractmethod
    def extreme(self, value: Tensor, count: int, kind: Kind) -> Tensor:
        """Returns the largest or smallest value of all ranks, without a gradient."""


class Own(Tensor):
    """A tensor of this rank's samples.

    Attributes:
        plain: The same as a plain tensor.
        joint: Combines results over all samples.
        is_by_samples: Whether to follow only operations that keep samples apart. Other operations then return plain
            tensors, whose gradients are not taken for those of the batch.
    """

    plain: Tensor
    joint: Joint
    is_by_samples: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Own))
        name = getattr(func, "__name__", "")
        if name not in _SHAPES:
            first.joint.names.append(name)
        given = plain_of(args), plain_of(kwargs)
        if isinstance(args[0] if args else None, Own) or name in WITH_REDUCTION:
            found = _over_all(name, func, *given, first.joint)
            if found is not None:
                return found
        if name in _LOOKS and not first.is_by_samples and isinstance(args[0], Own):
            raise NotSums
        made = func(*given[0], **given[1])
        if first.is_by_samples and not (name in _BY_SAMPLE or _leaves_samples(name, *given)):
            return made
        return own_of(made, first.joint, first.is_by_samples)


def own_of(tree: Any, joint: Joint, is_by_samples: bool = False) -> Any:
    """Returns ``tree`` with its tensors as :class:`Own`."""

    def marked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, Own):
            return leaf
        made = leaf.as_subclass(Own)
        made.plain, made.joint, made.is_by_samples = leaf, joint, is_by_samples
        return made

    return map_leaves(marked, tree)


def called(function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of :class:`Own` tensors. PyTorch's own losses are not left to PyTorch's dispatch, which drops
    the weight of ``l1_loss``."""
    if isinstance(function, partial):
        return called(function.func, (*function.args, *args), {**function.keywords, **kwargs})
    if any(function is getattr(F, name) for name in WITH_REDUCTION):
        return Own.__torch_function__(function, (Own,), args, kwargs)
    return function(*args, **kwargs)


def plain_of(tree: Any) -> Any:
    """Returns ``tree`` with plain tensors."""
    if isinstance(tree, Tensor):
        return getattr(tree, "plain", tree) if type(tree) is not Tensor else tree
    if type(tree) in (tuple, list):
        return type(tree)(map(plain_of, tree))
    if type(tree) is dict:
        return {key: plain_of(value) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(plain_of(tree.start), plain_of(tree.stop), plain_of(tree.step))
    return map_leaves(lambda leaf: getattr(leaf, "plain", leaf), tree)


_SHAPES = frozenset({"__get__", "__len__", "dim", "numel", "size"})
"""Functions that read the shape of a tensor, or another of its attributes. They tell nothing of the path through a
function: one that goes through a list of samples calls them once for each.
"""
_LOOKS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__")
"""Functions that read single numbers, by which a loss might branch."""

_EXTREMES: dict[str, Kind] = {
    **{"max": "max", "amax": "max", "any": "max"},
    **{"min": "min", "amin": "min", "all": "min"},
}

_ELEMENTWISE = {
    *("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *(
        "binary_cross_entropy_with_logits",
        "kl_div",
        "poisson_nll_loss",
        "gaussian_nll_loss",
        "soft_margin_loss",
    ),
    *("hinge_embedding_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss"),
    *(
        "cosine_embedding_loss",
        "margin_ranking_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
    ),
}
"""PyTorch's losses whose mean is the mean of their results without reduction."""
WITH_REDUCTION = {*_ELEMENTWISE, "cross_entropy", "nll_loss", "ctc_loss"}
"""PyTorch's losses that are sums over samples."""
_PAIRED = {
    *("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss"),
}
"""Losses whose two tensors must have one shape. Otherwise PyTorch would broadcast, and mix samples."""

_OVER_WEIGHTS = {"l1_loss", "mse_loss"}
"""Losses whose mean with a weight for each element is over the sum of these weights."""
_BY_SAMPLE = {
    *("add", "sub", "rsub", "mul", "div", "true_divide", "pow", "neg", "abs", "exp", "log", "log1p", "sqrt"),
    *(
        "square",
        "sigmoid",
        "tanh",
        "relu",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "where",
        "detach",
        "clone",
    ),
    *(
        "nan_to_num",
        "masked_fill",
        "masked_select",
        "view",
        "reshape",
        "flatten",
        "unsqueeze",
        "view_as",
        "to",
    ),
    *(
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "type_as",
        "contiguous",
        "reshape_as",
        "__rsub__",
    ),
    *(
        "__rdiv__",
        "__rpow__",
        "gt",
        "lt",
        "ge",
        "le",
        "eq",
        "ne",
        "isnan",
        "isfinite",
        "logical_not",
        "expand_as",
    ),
}
"""Functions that compute each number from those at the same position."""


def _leaves_samples(name: str, args: Any, kwargs: Any) -> bool:
    """Returns True if samples, along dimension 0, stay apart: other dimensions are reduced, or samples selected."""
    if name in ("sum", "mean"):
        dims = _dims(args, kwargs)
        return dims is not None and 0 not in {dim % max(1, args[0].dim()) for dim in dims}
    if name == "__getitem__":
        return isinstance(args[1], Tensor) and args[1].dtype is torch.bool
    return name == "squeeze" and len(args[0]) != 1


def _dims(args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Returns the dimensions of a reduction; None for all."""
    given = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if given is None or isinstance(given, torch.dtype):
        return None
    return (given,) if isinstance(given, int) else tuple(given) or None


def _is_full(args: Any, kwargs: Any) -> bool:
    if len(args) > 2 or set(kwargs) - {"dim", "axis", "dtype"}:
        return False
    if len(args) > 1 and not isinstance(args[1], int | tuple | list | None):
        return False
    dims = _dims(args, kwargs)
    return dims is None or {dim % max(1, args[0].dim()) for dim in dims} == set(range(args[0].dim()))


def _over_all(name: str, func: Any, args: Any, kwargs: Any, joint: Joint) -> Any:
    """Returns the result over all samples; None if the function does not reduce over all of them."""
    if name in WITH_REDUCTION and getattr(F, name, None) is func:
        return _loss_over_all(name, func, args, kwargs, joint)
    if name in ("sum", "mean", "count_nonzero", *_EXTREMES) and _is_full(args, kwargs):
        value = args[0]
        if name in _EXTREMES:
            return _extreme(name, func, value, joint) if not kwargs and len(args) == 1 else None
        if name == "count_nonzero":
            return joint.join(func(value), 0, _by_one)
        total = total_of(value if (kind := kwargs.get("dtype")) is None else value.to(kind))
        sizes = (value.numel(), *value.shape[:1])
        return joint.join(total, value.numel(), float if name == "mean" else _by_one, sizes)
    return None


def _extreme(name: str, func: Any, value: Tensor, joint: Joint) -> Any:
    if value.requires_grad and torch.is_grad_enabled():
        return None
    return joint.extreme(
        func(value) if value.numel() else value.new_zeros(()), value.numel(), _EXTREMES[name]
    )


def _by_one(_: float) -> float:
    return 1.0


def total_of(each: Tensor) -> Tensor:
    """Returns the sum in at least float32: a sum over a batch overflows float16 and loses precision in bfloat16."""
    if not each.is_floating_point():
        return each.sum()
    return each.sum(dtype=torch.promote_types(each.dtype, torch.float32))


@lru_cache(maxsize=64)
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _loss_over_all(name: str, func: Any, args: Any, kwargs: Any, joint: Joint) -> Any:
    """Returns a PyTorch loss over all ranks; None if it is not reduced, or is not a sum over samples."""
    given = dict(_signature(func).bind(*args, **kwargs).arguments)
    how = given.pop("reduction", "mean")
    old = [given.pop(each, None) for each in ("size_average", "reduce")]
    if how not in ("mean", "sum", "batchmean") or old != [None, None]:
        return None
    divisor = _by_one if how == "sum" else float
    if name in ("cross_entropy", "nll_loss"):
        outputs, targets = given.pop("input"), given.pop("target")
        known = exact(partial(func, reduction=how, **given))
        return joint.join(
            known.total(outputs, targets), known.count(targets), known.divisor, (targets.numel(),)
        )
    if name in _PAIRED and given["input"].shape != given["target"].shape:
        return None
    weight = given.get("weight") if name in _OVER_WEIGHTS and how == "mean" else None
    if weight is not None and weight.requires_grad:
        return None
    each = func(**given, reduction="none")
    if name == "ctc_loss" and how == "mean":
        lengths = torch.as_tensor(given["target_lengths"], device=each.device)
        each = each / lengths.clamp(min=1)
    count: Any = given["input"].shape[0] if how == "batchmean" else each.numel()
    count = count if weight is None else total_of(weight)
    return joint.join(total_of(each), count, divisor, (each.numel(), *each.shape[:1]))
