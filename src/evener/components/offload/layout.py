"""Decides which tensors can be offloaded, and restores them from bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from evener.components.sharded_tensor.local import is_divided
from evener.torch_internals.dispatch import wraps


def is_plain(tensor: Tensor) -> bool:
    """Returns True if the tensor can be restored from its bytes, type, shape and layout."""
    return (
        tensor.layout is torch.strided
        and not wraps(type(tensor))
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns all bytes of the storage of a plain tensor."""
    whole = tensor.detach().as_strided((_places(tensor),), (1,), 0)
    return whole.view(torch.uint8)


def _places(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


class TensorLayout:
    """The layout of a plain tensor in its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset, self._nbytes = tensor.storage_offset(), _places(tensor) * tensor.element_size()

    def view_on(self, memory: Tensor) -> Tensor:
        """Returns a tensor of this layout in other memory, given as bytes."""
        numbers = memory[: self._nbytes].view(self._dtype)
        return numbers.as_strided(self._shape, self._stride, self._offset)


def divided_as(numbers: Tensor, parameter: Tensor) -> Tensor:
    """Returns a rank's ``numbers`` of an optimizer state in the form of ``parameter`` (a DTensor if that is one), in
    the same memory."""
    if not is_divided(parameter) or numbers.shape != parameter.to_local().shape:
        return numbers
    held: Tensor = type(parameter).from_local(
        numbers,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return held
