"""Names of operators: modes that see each of them, what they read and write, and tensors that have no memory.

- ``TorchDispatchMode`` sees every operator that autograd runs. The class is documented and lies in a private module.
- ``torch._C._current_graph_task_id`` says whether autograd's engine runs an operator, and ``OpOverload._schema`` what
  an operator writes into and what it returns of its arguments' memory. Neither has a public name.
- ``aten._local_scalar_dense`` is an operator whose name has an underscore.
- ``FakeTensorMode`` of ``torch._subclasses`` makes tensors that have a device, a type and a shape, and no memory. On
  the meta device, which is public, an operator is chosen as if there were no device: attention keeps its whole matrix
  there, and batch normalization other results than on a GPU. A fake tensor goes the way of the device that it names.
- ``__tensor_flatten__`` is documented for tensors that are made of others, and known to no type.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, _guards
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

READS_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operator that ``item``, ``float`` and ``bool`` of a tensor come to."""


# Modes


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
    """Tells whether tensors of a class are made of others, as DTensors are.

    A mode that returns ``NotImplemented`` for them sees the operators on these.
    """
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> dict[str, Any]:
    """Returns, by name, what a tensor is made of whose class :func:`wraps` others: of a DTensor the mesh too."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def in_backward() -> bool:
    """Tells whether autograd's engine runs this."""
    return bool(torch._C._current_graph_task_id() != -1)


# What operators do to memory


def _schema_of(function: Any) -> Any:
    """Returns None for an operator that has functions for arguments."""
    return getattr(function, "_schema", None)


@cache
def makes_memory(function: Any) -> bool:
    """Tells whether what an operator returns may lie in memory of its own: it is no view of an argument, and no
    argument."""
    if function is torch.ops.aten.lift_fresh.default:  # what torch.tensor has made in silence
        return True
    schema = _schema_of(function)
    return schema is None or not schema.returns or any(each.alias_info is None for each in schema.returns)


@cache
def may_resize(function: Any) -> bool:
    """Tells whether an operator that makes no memory may give that of an argument another size: by its name, and with
    ``out=``."""
    schema = _schema_of(function)
    if schema is None:
        return True
    of_out = any(argument.is_out for argument in schema.arguments)
    return of_out or any(word in schema.name for word in ("resize", "set_"))


def written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns those of the arguments that the call writes into; none of an operator that has functions for them."""
    schema = _schema_of(function)
    arguments = () if schema is None else schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return [given[argument.name] for argument in arguments if argument.is_write and argument.name in given]


# Tensors without memory


def fake_mode() -> Any:
    """Makes a mode in which every new tensor is fake, and a real one that is used counts as its fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


active_fake_mode: Callable[[], Any] = _guards.active_fake_mode
"""Returns the mode that makes tensors fake here; None where there is none."""

without_fakes: Callable[[], Any] = unset_fake_temporarily
"""Enters a block in which tensors are real again."""


def is_fake(tensor: Tensor) -> bool:
    """Tells whether the tensor has no memory."""
    return isinstance(tensor, FakeTensor)


def depends_on_numbers(error: BaseException) -> bool:
    """Tells whether the error was raised for want of numbers."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


@contextmanager
def exchangeable() -> Iterator[None]:
    """Has ``Module.to`` work in the block on modules of fake tensors.

    It exchanges the inside of a fake parameter for that of the converted one, by ``torch.utils.swap_tensors``, which
    refuses tensors to which something refers weakly, and the mode itself does.
    """
    with mock.patch.object(torch.utils, "swap_tensors", _exchange):
        yield


def _exchange(one: Any, other: Any) -> None:
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
