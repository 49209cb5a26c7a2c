"""Parameters from before ``evener.prepare`` in whose places a strategy has put this rank's parts.

A list that the loop made before, as for clipping, still holds them. They have no gradients and nobody trains them, so
that a loop would clip, freeze or log nothing without an error. What tells only of their kind stays, such as a count of
the model's numbers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from evener.errors import ConfigurationError

_OF_KIND = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "names", "is_leaf", "requires_grad"),
        *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size", "__len__"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_sparse", "is_cuda", "is_meta"),
        *("itemsize", "nbytes"),
    )
)


class ReplacedParameter(nn.Parameter):
    """A parameter that is trained no more. Refuses what reads or changes its numbers, its gradient or its hooks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        descriptor = getattr(func, "__self__", None) if name in ("__get__", "__set__") else None
        if name == "__set__" or getattr(descriptor, "__name__", name) not in _OF_KIND:
            raise ConfigurationError(
                "a parameter from before evener.prepare is used, which has divided the model and put others in their "
                "places: take model.parameters() again, after evener.prepare, and give it the optimizers that have them"
            )
        return nn.Parameter.__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def retire(parameter: nn.Parameter) -> None:
    """Turns a parameter that was replaced into a :class:`ReplacedParameter`. One that is frozen stays as it is, for
    what has its numbers may go on to read them."""
    if type(parameter) is nn.Parameter and parameter.requires_grad:
        parameter.__class__ = ReplacedParameter
