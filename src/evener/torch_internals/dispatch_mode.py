"""Seeing every operator that autograd runs: ``TorchDispatchMode``, and what a mode has to know of where it is.

The class is documented and lies in a private module. Which operators belong to backward is asked of autograd's engine,
by ``torch._C._current_graph_task_id``, and what an operator returns of its arguments' memory is in its ``_schema``;
neither has a public name.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS_NUMBER = torch.ops.aten._local_scalar_dense.default
"""What ``item``, ``float`` and ``bool`` of a tensor come to."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's, with types: ``__torch_dispatch__`` is called for every operator in place of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


def wraps(kind: type) -> bool:
    """Whether tensors of a class are made of others, as DTensors are: a mode that returns ``NotImplemented`` for them
    sees the operators on these."""
    return hasattr(kind, "__tensor_flatten__")


def in_backward() -> bool:
    """Whether autograd's engine is running this."""
    return bool(torch._C._current_graph_task_id() != -1)


@cache
def makes_memory(function: Any) -> bool:
    """Whether what an operator returns may lie in memory of its own: it is no view of an argument, and no argument."""
    if function is torch.ops.aten.lift_fresh.default:  # what torch.tensor has made in silence
        return True
    schema = getattr(function, "_schema", None)
    return schema is None or not schema.returns or any(each.alias_info is None for each in schema.returns)


@cache
def may_resize(function: Any) -> bool:
    """Whether an operator that makes no memory may give that of an argument another size: by its name, and with
    ``out=``."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return True
    of_out = any(argument.is_out for argument in schema.arguments)
    return of_out or any(word in schema.name for word in ("resize", "set_"))
