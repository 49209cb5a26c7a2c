"""Which tensors can go outside, and how they are made again of the bytes there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from evener.components.sharded_tensor.local import is_divided
from evener.torch_internals.dispatch_mode import wraps


def is_plain(tensor: Tensor) -> bool:
    """Whether its bytes say all of it, together with its type, shape and place."""
    return (
        tensor.layout is torch.strided
        and not wraps(type(tensor))
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the memory in which a plain tensor lies."""
    whole = tensor.detach().as_strided((_places(tensor),), (1,), 0)
    return whole.view(torch.uint8)


def _places(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


class Form:
    """How a plain tensor lies in its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset, self._nbytes = tensor.storage_offset(), _places(tensor) * tensor.element_size()

    def of(self, memory: Tensor) -> Tensor:
        """The same in other memory, given by its bytes."""
        numbers = memory[: self._nbytes].view(self._dtype)
        return numbers.as_strided(self._shape, self._stride, self._offset)


def divided_as(numbers: Tensor, parameter: Tensor) -> Tensor:
    """A rank's ``numbers`` of a state in the form of its ``parameter``, in the same memory."""
    if not is_divided(parameter) or numbers.shape != parameter.to_local().shape:  # type: ignore[attr-defined]
        return numbers
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        numbers,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
