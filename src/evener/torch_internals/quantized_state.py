"""Optimizer state in a few bits, as torchao keeps it: ``_AdamBase._new_buffer`` and its classes of tensors.

A tensor of these classes looks like one of floats and holds codes, a scale for each block and a table. It says its
numbers by ``dequantize`` and takes others by ``copy_``. What makes such a tensor for a parameter, of the optimizer's
kind and divided as the parameter is, has no public name, and neither has the base class.

Tested with torchao 0.18.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from evener.torch_internals.dispatch import parts_of, wraps


def is_quantized(value: object) -> bool:
    """Tells whether it is a tensor whose numbers lie in codes; a DTensor of such is not."""
    return (
        isinstance(value, Tensor)
        and wraps(type(value))
        and not isinstance(value, DTensor)
        and hasattr(value, "dequantize")
        and hasattr(value, "codes")
    )


def makes_quantized(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the optimizer keeps its state in codes."""
    return hasattr(optimizer, "_new_buffer")


def new_state(optimizer: Any, parameter: Tensor, signed: bool) -> Tensor:
    """Makes the state of a parameter at first: codes, or plain zeros where these take too little memory."""
    found: Tensor = optimizer._new_buffer(parameter.detach(), signed)
    return found


def make_tables(optimizer: Any) -> None:
    """Works out what codes mean, which happens once in a process, and is kept."""
    size = optimizer.block_size
    if isinstance(size, int):  # one without codes has none
        numbers = torch.zeros(size * -(-4096 // size))
        for signed in (True, False):
            new_state(optimizer, numbers, signed)


def rounds_by_chance(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the optimizer's updates draw random numbers."""
    return bool(getattr(optimizer, "bf16_stochastic_round", False))


def codes_of(value: Tensor) -> dict[str, Tensor]:
    """Returns the tensors in which the numbers lie, by name, without the table, which is the same for all."""
    return {name: part for name, part in parts_of(value).items() if name != "qmap"}


def lowest_code(value: Tensor) -> Tensor | None:
    """Returns what the lowest code means in a block whose scale is 1; None where it is minus what the highest means."""
    table: Tensor | None = getattr(value, "qmap", None)
    return None if table is None else table[0]


def block_size(value: Any) -> int:
    """Counts the numbers that share a scale, in the order of the flat tensor."""
    return int(value.numel() // value.scale.numel())
