"""Access to the local shard of a ``DTensor``, PyTorch's divided tensor.

A DTensor has the shape of the whole tensor, and cannot be mixed with plain tensors in an operation. So Evener computes
norms, checkpoints and first weights with the local shard. The parameter's
:class:`~evener.components.sharded_tensor.shard_spec.ShardSpec` tells the shard's place in the whole tensor.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from evener.distributed.mesh import Mesh


def is_divided(value: object) -> TypeGuard[Any]:
    """Returns True if the value is a DTensor.

    This does not import PyTorch's module of DTensors, which takes a second: before somebody has, there are none.
    """
    if type(value) is nn.Parameter or type(value) is Tensor:
        return False
    divided = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return divided is not None and isinstance(value, divided)


def local(tensor: Tensor) -> Tensor:
    """Returns the local shard of a DTensor, which shares its memory. Returns any other tensor itself."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
        return shard


def changeable(parameter: nn.Parameter, stack: ExitStack) -> Tensor:
    """Returns this rank's shard of ``parameter``, which may be changed. The old values are restored when ``stack``
    closes.

    A parameter that is no DTensor gets new memory for that time, because other ranks may compute with its usual memory
    (shared weights, :mod:`evener.strategies.sharded.full_weights`).
    """
    held = parameter.detach()
    if is_divided(held):
        numbers = local(held)
        stack.callback(numbers.copy_, numbers.clone())
        return numbers
    numbers = held.clone()  # writes to it do not change the parameter's version counter
    stack.callback(setattr, parameter, "data", parameter.data)
    parameter.data = numbers
    return numbers


def as_held(numbers: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's ``numbers`` in the form of ``like``: as a DTensor if ``like`` is one."""
    if not is_divided(like):
        return numbers
    held = torch.empty_like(like, dtype=numbers.dtype, requires_grad=False)
    local(held).copy_(numbers.detach())
    return held


def off_host(numbers: Tensor, mesh: Mesh) -> Tensor:
    """Returns ``numbers`` on the kind of device that the mesh's process groups use. On a GPU, moves what a rank has in
    host memory."""
    return numbers.to(mesh.device_type) if numbers.device.type == "cpu" else numbers
