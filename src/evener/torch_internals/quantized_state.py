"""Quantized optimizer state of torchao: ``_AdamBase._new_buffer`` and the tensor classes that it returns.

A tensor of these classes behaves like a float tensor and holds codes, a scale for each block and a table of values.
``dequantize`` returns its values, and ``copy_`` sets them. Neither the base class nor the method that makes such a
tensor for a parameter (for this optimizer, and sharded like the parameter) is public.

Tested with torchao 0.18.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evener.torch_internals.dispatch import parts_of, wraps


def is_quantized(value: object) -> bool:
    """Returns True if ``value`` is a quantized tensor. A DTensor that holds one has no codes."""
    return (
        isinstance(value, Tensor)
        and wraps(type(value))
        and hasattr(value, "dequantize")
        and hasattr(value, "codes")
    )


def makes_quantized(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer keeps its state quantized."""
    return hasattr(optimizer, "_new_buffer")


def new_state(optimizer: Any, parameter: Tensor, signed: bool) -> Tensor:
    """Returns the initial state of a parameter: a quantized tensor, or plain zeros if torchao does not quantize it."""
    found: Tensor = optimizer._new_buffer(parameter.detach(), signed)
    return found


def make_tables(optimizer: Any) -> None:
    """Makes torchao compute its tables of values, which it caches for the process."""
    size = optimizer.block_size
    if isinstance(size, int):  # an optimizer that does not quantize has none
        numbers = torch.zeros(size * -(-4096 // size))
        for signed in (True, False):
            new_state(optimizer, numbers, signed)


def rounds_by_chance(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer uses stochastic rounding, so that its updates draw random numbers."""
    return bool(getattr(optimizer, "bf16_stochastic_round", False))


def codes_of(value: Tensor) -> dict[str, Tensor]:
    """Returns the inner tensors of a quantized tensor by name, without the table, which all tensors share."""
    return {name: part for name, part in parts_of(value).items() if name != "qmap"}


def lowest_code(value: Tensor) -> Tensor | None:
    """Returns the value of the lowest code in a block with scale 1; None if that is minus the value of the highest."""
    table: Tensor | None = getattr(value, "qmap", None)
    return None if table is None else table[0]


def block_size(value: Any) -> int:
    """Returns the number of consecutive values in the flat tensor that share a scale."""
    return int(value.numel() // value.scale.numel())
