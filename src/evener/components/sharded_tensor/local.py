"""A rank's own numbers of a tensor that PyTorch divides over the ranks, a ``DTensor``, in one place.

A DTensor says the shape of the whole and refuses to meet plain tensors in one operation. What Evener does to a divided
parameter (norms, checkpoints, first weights) it does to the numbers that the rank holds, whose place in the whole the
parameter's :class:`~evener.components.sharded_tensor.shard_spec.Slice` says.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evener.distributed.mesh import Mesh


def is_divided(value: object) -> bool:
    """Whether it is a DTensor."""
    return isinstance(value, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The numbers of ``tensor`` that this rank holds, in the same memory; itself where it is no DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def changeable(parameter: nn.Parameter, stack: ExitStack) -> Tensor:
    """This rank's numbers of ``parameter``, to be changed until ``stack`` ends, which brings back those of before.

    What is no DTensor gets memory of its own for that time: other ranks may compute with what it had (weights in
    common, :mod:`evener.strategies.sharded.full_weights`).
    """
    held = parameter.detach()
    if isinstance(held, DTensor):
        numbers = local(held)
        stack.callback(numbers.copy_, numbers.clone())
        return numbers
    numbers = held.clone()  # of which autograd does not count the writes as those to the parameter
    stack.callback(setattr, parameter, "data", parameter.data)
    parameter.data = numbers
    return numbers


def as_held(numbers: Tensor, like: Tensor) -> Tensor:
    """This rank's ``numbers`` in the form of ``like``: a DTensor where that is one."""
    if not isinstance(like, DTensor):
        return numbers
    held = torch.empty_like(like, dtype=numbers.dtype, requires_grad=False)
    local(held).copy_(numbers.detach())
    return held


def off_host(numbers: Tensor, mesh: Mesh) -> Tensor:
    """``numbers`` where the groups of the mesh exchange: on a GPU, what a rank has put into the memory of its host."""
    return numbers.to(mesh.device_type) if numbers.device.type == "cpu" else numbers
