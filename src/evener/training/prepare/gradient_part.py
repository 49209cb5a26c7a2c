"""Gradients of divided weights, as a loop sees them: a rank has a part, and numbers of it are those of the whole.

``p.grad.norm()`` of a part would be another number on each rank, and nothing would tell. So between backward and update
such a gradient is a tensor whose norms, sums and extremes are taken over the ranks that hold the other parts; all ranks
must take them together. What changes each element alone works as on any tensor. Everything else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.sharded_tensor.shard_spec import ShardSpec
from evener.data.batch import map_leaves
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError
from evener.training.prepare.sample_tensor import plain_of

Meet = Callable[[str], Any]
NUMBER = "a number of a divided tensor"

_SEES = frozenset(
    (
        *(
            "__len__",
            "__repr__",
            "__format__",
            "__hash__",
            "size",
            "dim",
        ),
        *(
            "ndimension",
            "stride",
            "storage_offset",
            "is_contiguous",
            "element_size",
            "data_ptr",
            "get_device",
        ),
        *("untyped_storage", "is_floating_point", "is_complex", "is_set_to", "requires_grad_"),
        *("register_hook", "is_pinned", "is_shared"),
    )
)
"""What asks a tensor for no number in it."""
_ELEMENTWISE = frozenset(
    (
        *(
            "abs",
            "absolute",
            "add",
            "addcdiv",
            "addcmul",
            "clamp",
            "clamp_max",
            "clamp_min",
            "clip",
            "clone",
            "copy_",
        ),
        *(
            "cpu",
            "cuda",
            "detach",
            "detach_",
            "div",
            "divide",
            "double",
            "eq",
            "exp",
            "fill_",
            "float",
            "ge",
            "gt",
        ),
        *(
            "half",
            "bfloat16",
            "isfinite",
            "isinf",
            "isnan",
            "le",
            "lerp",
            "logical_not",
            "lt",
            "mul",
            "multiply",
        ),
        *(
            "nan_to_num",
            "ne",
            "neg",
            "pow",
            "reciprocal",
            "rsqrt",
            "rsub",
            "sgn",
            "sign",
            "sqrt",
            "square",
        ),
        *("sub", "subtract", "to", "true_divide", "where", "zero_", "zeros_like", "ones_like", "empty_like"),
        *("full_like", "type", "__add__", "__sub__", "__mul__", "__truediv__", "__pow__"),
        *("__neg__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__iadd__", "__isub__", "__imul__"),
        *(
            "__itruediv__",
            "_foreach_mul_",
            "_foreach_div_",
            "_foreach_add_",
            "_foreach_sub_",
            "_foreach_zero_",
        ),
        *("_foreach_clamp_min_", "_foreach_clamp_max_"),
    )
)
"""What computes each element from that of the same place."""
_SUMS = {"sum": "sum", "norm": "norm", "vector_norm": "norm", "linalg_vector_norm": "norm", "mean": "mean"}
_EXTREMES = {"max": "max", "amax": "max", "min": "min", "amin": "min", "any": "max", "all": "min"}
_SCALED = "_amp_foreach_non_finite_check_and_unscale_"

_ALONE = (
    "the gradient of a weight that is divided over the ranks was given to {name}, which would see this rank's part of "
    "it alone: norms, sums, extremes and what changes each element are those of the whole, and so is "
    "torch.nn.utils.clip_grad_norm_"
)


class GradientPart(Tensor):
    """This rank's part of a gradient.

    Attributes:
        plain: The same as a plain tensor.
        group: The ranks that hold the parts.
        count: The number of elements of the whole.
        meet: Called with what all ranks do together, before they do it.
    """

    plain: Tensor
    group: dist.ProcessGroup
    count: int
    meet: Meet

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        part = _first((args, kwargs))
        plain_args, plain_kwargs = plain_of(args), plain_of(kwargs)
        if name in ("numel", "nelement"):
            return part.count  # a mean that a loop takes itself is that of the whole
        if name in _SEES:
            return func(*plain_args, **plain_kwargs)
        if name in ("__get__", "__set__", "__delete__") or _in_place(name) in _ELEMENTWISE:
            made = func(*plain_args, **plain_kwargs)
            if name.startswith("_foreach_"):
                return args[0]  # written to in place, each of its own shape
            return map_leaves(lambda leaf: _alike(leaf, part, args), made)
        if name == _SCALED:
            func(*plain_args, **plain_kwargs)
            part.over_all(plain_args[1], "max")
            return None
        if args and args[0] is part and (name in _SUMS or name in _EXTREMES):
            return part.number(name, func, plain_args, plain_kwargs)
        raise ConfigurationError(_ALONE.format(name=name))

    def number(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Returns a number of the whole gradient. A collective call.

        Raises:
            ConfigurationError: If it is asked for along a dimension.
        """
        order = (
            kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2)) if "norm" in name else None
        )
        order = 2 if order in (None, "fro") else order
        along = kwargs.get("dim") is not None or len(args) > 1 + ("norm" in name)
        if along or isinstance(order, str) or (order is not None and order <= 0):
            raise ConfigurationError(
                f"{name} of the gradient of a weight that is divided over the ranks was asked for along a dimension, "
                "or in another way than for all elements: take that of all elements"
            )
        plain = self.plain
        if name in _EXTREMES:
            kind = _EXTREMES[name]
            plain = plain.bool() if name in ("any", "all") else plain
            numbers = plain if plain.is_floating_point() else plain.to(torch.int64)
            least = -math.inf if numbers.is_floating_point() else -torch.iinfo(torch.int64).max
            if not plain.numel():
                here = numbers.new_full((), least if kind == "max" else -least)
            else:
                here = numbers.max() if kind == "max" else numbers.min()
            return self.over_all(here, kind).to(plain.dtype)
        wide = torch.promote_types(plain.dtype, torch.float32)  # float16 cannot hold many squares
        if name == "mean":
            return (self.over_all(plain.sum(dtype=wide), "sum") / self.count).to(plain.dtype)
        if name == "sum":
            return self.over_all(func(*args, **kwargs), "sum")
        local = _norm_of(plain, float(order))
        if math.isinf(float(order)):
            return self.over_all(local, "max")
        powers = local.to(torch.promote_types(local.dtype, torch.float32)).pow(float(order))
        return self.over_all(powers, "sum").pow(1 / float(order)).to(local.dtype)

    def over_all(self, number: Tensor, kind: str) -> Tensor:
        """Combines a number of each rank, in place. A collective call."""
        self.meet(NUMBER)
        if kind == "sum":
            dist.all_reduce(number, group=self.group)
            return number
        return number.copy_(greatest(number, self.group) if kind == "max" else -greatest(-number, self.group))


def _norm_of(plain: Tensor, order: float) -> Tensor:
    if plain.numel() or not math.isinf(order):
        found: Tensor = torch.linalg.vector_norm(plain, order)
        return found
    return plain.real.new_zeros(())  # PyTorch knows no greatest of nothing


def greatest(number: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the greatest of the numbers of all ranks; NaN if one is, which backends lose. A collective call."""
    both = torch.stack([number, number.isnan().to(number.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    found, is_nan = both.unbind()
    return found.masked_fill(is_nan.bool(), math.nan) if number.is_floating_point() else found


def part_of(plain: Tensor, axes: tuple[str, ...], count: int, mesh: Mesh, meet: Meet) -> Tensor:
    """Returns ``plain``, a part of a gradient of ``count`` elements divided over ``axes``, as a loop sees it."""
    group = mesh.group(*axes)
    if group is None:
        return plain
    return _made(plain, group, count, meet)


def _made(plain: Tensor, group: dist.ProcessGroup, count: int, meet: Meet) -> GradientPart:
    made = plain.as_subclass(GradientPart)
    made.plain, made.group, made.count, made.meet = plain, group, count, meet
    return made


def _in_place(name: str) -> str:
    """Returns the name of an operation without the underscore of its in-place form, unless only that is known."""
    return name if name in _ELEMENTWISE or name.startswith("__") else name.removesuffix("_")


def _first(tree: Any) -> Any:
    if isinstance(tree, GradientPart):
        return tree
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return next(filter(None.__ne__, map(_first, values)), None)


def _alike(leaf: Any, part: GradientPart, args: Any) -> Any:
    """Returns a result of this rank's elements as a part: the argument itself if it was changed in place."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.shape != part.plain.shape:
        raise ConfigurationError(_ALONE.format(name="something that gives it another shape"))
    if leaf is part.plain and args and args[0] is part:
        return part
    return _made(leaf, part.group, part.count, part.meet)


class ShownParts:
    """The gradients of parameters of which this rank has a part, as the loop sees them.

    Args:
        pieces: The parameters, with this rank's part of each.
        meet: Called with what all ranks do together, before they do it.
    """

    def __init__(self, pieces: Mapping[nn.Parameter, ShardSpec], mesh: Mesh, meet: Meet) -> None:
        self._pieces, self._mesh, self._meet = pieces, mesh, meet

    def show(self) -> None:
        """Has the loop see parts of gradients as such, until :meth:`hide`."""
        for parameter, spec in self._pieces.items():
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or isinstance(gradient, GradientPart):
                continue
            count = math.prod(spec.whole_shape(gradient.shape))
            axes = tuple(sorted(spec.axes))
            _give(parameter, part_of(gradient, axes, count, self._mesh, self._meet))

    def hide(self) -> None:
        """Gives parameters their gradients as plain tensors."""
        for parameter in self._pieces:
            if isinstance(parameter.grad, GradientPart):
                _give(parameter, parameter.grad.plain)


def _give(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Makes ``gradient`` that of the parameter. It keeps the marks of the one before."""
    assert parameter.grad is not None
    marks = {name: value for name, value in vars(parameter.grad).items() if name.startswith("evener_")}
    parameter.grad = gradient
    vars(parameter.grad).update(marks)
