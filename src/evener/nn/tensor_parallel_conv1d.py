"""Tensor parallelism for ``Conv1D`` of GPT-2 in transformers, a linear layer whose weight is (in, out)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from evener.nn.tensor_parallel import COLUMNS, ROWS, ColumnLayer, Divided, RowLayer
from evener.torch_internals.modules import own_parameters


def is_transposed(layer: nn.Module) -> bool:
    """Returns True if the layer has the class name, parameters and shapes of transformers' ``Conv1D``. What it computes
    is not checked here: a trial run does that."""
    held = own_parameters(layer)
    weight, bias = held.get("weight"), held.get("bias")
    known = type(layer).__name__ in ("Conv1D", "ColumnTransposed", "RowTransposed") and held.keys() == {
        "weight",
        "bias",
    }
    return (
        known
        and weight is not None
        and bias is not None
        and weight.ndim == 2
        and bias.shape == weight.shape[1:]
    )


def _multiplied(layer: Any, input: Tensor, weight: Any, bias: Any) -> Tensor:
    flat = input.reshape(-1, input.shape[-1])
    product = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return product.view(*input.shape[:-1], weight.shape[1])


class ColumnTransposed(ColumnLayer):
    """``Conv1D`` that computes some of its output features."""

    held: ClassVar = {"weight": 1, "bias": 0}
    compute = _multiplied


class RowTransposed(RowLayer):
    """``Conv1D`` that reads some of its input features."""

    held: ClassVar = {"weight": 0}
    compute = _multiplied


def column_kinds(layer: nn.Module) -> dict[type[nn.Module], type[Divided]]:
    """Returns the ``kinds`` for :func:`~evener.nn.tensor_parallel.divide_layer` of a layer divided by outputs."""
    return {type(layer): ColumnTransposed} if is_transposed(layer) else COLUMNS


def row_kinds(layer: nn.Module) -> dict[type[nn.Module], type[Divided]]:
    """Returns the ``kinds`` for :func:`~evener.nn.tensor_parallel.divide_layer` of a layer divided by inputs."""
    return {type(layer): RowTransposed} if is_transposed(layer) else ROWS
