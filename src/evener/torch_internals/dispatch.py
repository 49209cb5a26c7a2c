"""Private names of operators: dispatch modes, schemas of operators, and fake tensors.

- ``TorchDispatchMode`` sees every operator that autograd runs. The class is documented, but its module is private.
- ``_get_current_dispatch_mode`` tells whether such a mode is active.
- ``torch._C._current_graph_task_id`` tells whether autograd's engine runs an operator. ``OpOverload._schema`` tells
  which arguments an operator writes and which outputs share memory with arguments. Neither has a public name.
- ``aten._local_scalar_dense`` is an operator whose name has an underscore.
- ``FakeTensorMode`` of ``torch._subclasses`` makes tensors with a device, a type and a shape, but without memory. The
  public meta device chooses operators without regard to the device: there attention keeps its whole matrix, and batch
  normalization saves other results than on a GPU. A fake tensor uses the operators of the device that it names.
- ``__tensor_flatten__`` is documented for tensor subclasses that wrap other tensors, but no type declares it.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

READS_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operator that ``item()``, ``float()`` and ``bool()`` of a tensor run."""


# Modes


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's ``TorchDispatchMode`` with types. ``__torch_dispatch__`` is called in place of every operator.

    Inside, what ``torch.compile`` has wrapped runs uncompiled. PyTorch never again compiles a function that it would
    have had to compile under a mode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uncompiled: list[ExitStack] = []

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        self._uncompiled.append(uncompiled := ExitStack())
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._uncompiled.pop().close()


def mode_is_active() -> bool:
    """Returns True if a dispatch mode sees the operators that the calling code runs."""
    return _get_current_dispatch_mode() is not None


def wraps(kind: type) -> bool:
    """Returns True if tensors of the class wrap other tensors, as DTensors do.

    A mode that returns ``NotImplemented`` for them sees the operators on the wrapped tensors.
    """
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> dict[str, Any]:
    """Returns the inner parts, by name, of a tensor whose class :func:`wraps` others. Not all need be tensors."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def in_backward() -> bool:
    """Returns True if autograd's engine runs the calling code."""
    return bool(torch._C._current_graph_task_id() != -1)


# Memory use of operators


def _schema_of(function: Any) -> Any:
    """Returns the schema of an operator. Returns None for an operator that takes functions as arguments."""
    return getattr(function, "_schema", None)


@cache
def makes_memory(function: Any) -> bool:
    """Returns True if an output of the operator may have new memory: it is neither an argument nor a view of one."""
    if function is torch.ops.aten.lift_fresh.default:  # torch.tensor allocated the memory without an operator
        return True
    schema = _schema_of(function)
    return schema is None or not schema.returns or any(each.alias_info is None for each in schema.returns)


@cache
def may_resize(function: Any) -> bool:
    """Returns True if the operator may resize an argument's memory, judged by its name and ``out=`` arguments."""
    schema = _schema_of(function)
    if schema is None:
        return True
    of_out = any(argument.is_out for argument in schema.arguments)
    return of_out or any(word in schema.name for word in ("resize", "set_"))


def named_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by their names; none for an operator that takes functions as arguments."""
    schema = _schema_of(function)
    names = () if schema is None else [argument.name for argument in schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that the call writes into; empty for an operator that takes functions as arguments."""
    schema = _schema_of(function)
    arguments = () if schema is None else schema.arguments
    given = named_arguments(function, args, kwargs)
    return [given[argument.name] for argument in arguments if argument.is_write and argument.name in given]


# Fake tensors


@contextmanager
def refusals_not_logged() -> Iterator[None]:
    """Keeps fake tensors from logging an error that an operator raises. It is raised anyway, and may be expected."""
    log = logging.getLogger(FakeTensor.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def device_asked(function: Any, args: Sequence[Any]) -> torch.device | None:
    """Returns the device, if the operator asks a fake tensor for its device. No mode needs to see this, and it comes
    more often than all others together."""
    if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def fake_mode() -> Any:
    """Returns a mode in which every new tensor is fake. Real tensors may be used; they are converted to fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


active_fake_mode: Callable[[], Any] = _guards.active_fake_mode
"""Returns the active fake mode. Returns None if there is none."""

without_fakes: Callable[[], Any] = unset_fake_temporarily
"""Returns a context in which the fake mode is off and new tensors are real."""


def is_fake(tensor: Tensor) -> bool:
    """Returns True if the tensor is fake and has no memory."""
    return isinstance(tensor, FakeTensor)


def depends_on_numbers(error: BaseException) -> bool:
    """Returns True if the error was raised because a fake tensor has no values."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


@contextmanager
def exchangeable() -> Iterator[None]:
    """Makes ``Module.to`` work on modules of fake tensors during the block.

    ``Module.to`` swaps a fake parameter with the converted one by ``torch.utils.swap_tensors``. That function refuses
    tensors with weak references, and the fake mode itself holds weak references.
    """
    with mock.patch.object(torch.utils, "swap_tensors", _exchange):
        yield


def _exchange(one: Any, other: Any) -> None:
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
