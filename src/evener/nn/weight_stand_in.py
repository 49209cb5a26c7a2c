"""A stand-in for a divided weight, for code outside of its layer: it has the shape of the whole weight and no values.

A forward may read ``self.embed.weight.dtype`` or ``self.embed.weight.device``, which do not depend on the division. A
forward that computed with the values would take this rank's part for the whole weight, so that raises an error::

    x.to(weight)   weight.dtype   weight.shape   weight.new_zeros(3)   torch.zeros_like(weight)      answered
    F.linear(x, weight)   weight * 2   weight[0]   weight.sum()                                      refused
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evener.errors import TaskError

_ATTRIBUTES = {
    *("dtype", "device", "shape", "ndim", "requires_grad", "layout", "itemsize"),
    *("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "is_nested"),
}
_METHODS = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"),
    *("is_floating_point", "is_complex", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "is_tensor"),
}
"""Functions and methods whose answer depends on shape, type and device only."""


class SeenWeight(Tensor):
    """The shape, type and device of a whole weight, without values.

    Raises TaskError for every operation that reads values.

    Attributes:
        layer: The qualified name of its layer.
        form: A plain tensor of that shape, type and device, of one element that is expanded.
        own: This rank's part, whose gradient a loop of the user's own may read if it knows that it is a part.
    """

    layer: str
    form: Tensor
    own: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):
            is_read, name = name == "__get__", getattr(getattr(func, "__self__", None), "__name__", "")
            is_answered = is_read and name in _ATTRIBUTES
            if name == "grad" and (own := args[0].own) is not None:
                if not is_read:
                    own.grad = args[1]
                if not is_read or type(own.grad) is not Tensor:
                    return own.grad
        else:
            is_answered = name in _METHODS
        seen = [each for each in (*args, *kwargs.values()) if isinstance(each, SeenWeight)]
        if is_answered:
            forms = [each.form if isinstance(each, SeenWeight) else each for each in args]
            return func(*forms, **{key: getattr(each, "form", each) for key, each in kwargs.items()})
        if name in ("to", "type_as") and not isinstance(args[0], SeenWeight):
            return args[0].to(dtype=seen[0].dtype, device=seen[0].device)
        raise TaskError(
            f"{seen[0].layer if seen else 'a layer'} is divided over ranks, and its weight is read from outside of it "
            f"in a forward pass by {name}, where it would be taken for the whole: call the layer, or leave it out of "
            "the plan"
        )


def seen(own: Tensor, shape: tuple[int, ...], layer: str) -> SeenWeight:
    """Returns a stand-in of ``shape`` for the weight of ``layer``; type and device are those of ``own``, this rank's
    part. It takes the memory of one element."""
    form = torch.empty((), dtype=own.dtype, device=own.device).expand(shape).requires_grad_(own.requires_grad)
    found = form.detach().as_subclass(SeenWeight)
    found.layer, found.form, found.own = layer, form, own
    return found
