"""A divided weight as code outside of its layer sees it: the form of the whole weight, and no numbers.

A forward that makes a mask of ``self.embed.weight.dtype`` on ``self.embed.weight.device`` uses nothing that is divided.
One that computes with the numbers would take this rank's part for the whole, so that is refused::

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
"""What is answered by form, type and place alone."""


class SeenWeight(Tensor):
    """The form, type and place of a whole weight.

    Attributes:
        layer: The qualified name of its layer.
        form: A plain tensor of this form, type and place.
    """

    layer: str
    form: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            is_answered = name in _ATTRIBUTES
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
    """What others see of the weight of ``layer``, of which this rank holds ``own``; no memory is taken."""
    form = torch.empty((), dtype=own.dtype, device=own.device).expand(shape).requires_grad_(own.requires_grad)
    found = form.detach().as_subclass(SeenWeight)
    found.layer, found.form = layer, form
    return found
