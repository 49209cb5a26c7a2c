"""Tensors that have a device, a type and a shape, and no memory: ``FakeTensorMode`` of ``torch._subclasses``.

On the meta device, which is public, an operator is chosen as if there were no device: attention keeps its whole matrix
there, and batch normalization other results than on a GPU. A fake tensor goes the way of the device that it names.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

__all__ = ["active_fake_mode", "depends_on_numbers", "exchangeable", "fake_mode", "is_fake", "without_fakes"]


def fake_mode() -> Any:
    """A mode in which every tensor that is made is fake, and a real one that is used counts as its fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


without_fakes: Callable[[], Any] = unset_fake_temporarily
"""In the block tensors are real again."""


def is_fake(tensor: Tensor) -> bool:
    """Whether it has no memory."""
    return isinstance(tensor, FakeTensor)


def depends_on_numbers(error: BaseException) -> bool:
    """Whether it was raised for want of numbers."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


@contextmanager
def exchangeable() -> Iterator[None]:
    """In the block ``Module.to`` works on modules of fake tensors.

    It exchanges the inside of a fake parameter for that of the converted one, by ``torch.utils.swap_tensors``, which
    refuses tensors to which something refers weakly, and the mode itself does.
    """
    with mock.patch.object(torch.utils, "swap_tensors", _exchange):
        yield


def _exchange(one: Any, other: Any) -> None:
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
