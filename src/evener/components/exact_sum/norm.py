"""The norm of all gradients together, with the same bits however the gradients are divided over the ranks.

Every square is cut into two digits, multiples of two powers of two, and the sum of each digit is exact in any order
(:mod:`evener.components.exact_sum.grid` says why). The powers follow from the largest element of all ranks and from the
number of elements, which no division changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.exact_sum.grid import magic
from evener.components.gradients import values, with_gradient
from evener.components.sharded_tensor.local import off_host
from evener.components.sharded_tensor.shard_spec import by_axes, shard_spec
from evener.distributed.mesh import Mesh
from evener.hardware.timers import waiting


def exact_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """Returns the 2-norm of the gradients of ``parameters``, in float64. If some are divided, all ranks must call this
    together."""
    groups = {axes: with_gradient(alike) for axes, alike in by_axes(parameters).items()}
    every = [parameter for alike in groups.values() for parameter in alike]
    device = every[0].device if every else None
    greatest, elements = torch.zeros((), dtype=torch.float64, device=device), 0
    for axes in sorted(groups):
        largest = [values(p).abs().amax().double() for p in groups[axes] if values(p).numel()]
        own = torch.stack([greatest, *largest]).amax()
        greatest = over_ranks(own, mesh, axes, dist.ReduceOp.MAX)
        elements += sum(map(_whole_numel, groups[axes]))
    top = float(greatest)
    if not elements or not top or not math.isfinite(top):
        return greatest
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for axes in sorted(groups):
        squares = squares + over_ranks(_squares(groups[axes], top, elements, device), mesh, axes)
    return squares.sum().sqrt()


def _squares(
    parameters: Sequence[nn.Parameter], top: float, elements: int, device: torch.device | None
) -> Tensor:
    """Returns the sums of both digits of the squares of this rank's elements."""
    bits, exponent = max(1, elements.bit_length()), 2 * math.frexp(top)[1]
    # The sum is at most 2**52 of these, and so is that of the rests, at most half of one.
    high = bits + exponent - 52
    numbers = [magic(unit) for unit in (high, high + bits - 53)]
    found = [torch.zeros(2, dtype=torch.float64, device=device)]
    for parameter in parameters:
        square = values(parameter).double().square()
        first = (square + numbers[0]) - numbers[0]
        second = ((square - first) + numbers[1]) - numbers[1]
        found.append(torch.stack([first.sum(), second.sum()]))
    return torch.stack(found).sum(0)


def _whole_numel(parameter: nn.Parameter) -> int:
    spec, held = shard_spec(parameter), values(parameter)
    return held.numel() if spec is None else math.prod(spec.whole_shape(held.shape))


def over_ranks(
    value: Tensor, mesh: Mesh, axes: tuple[str, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Returns the result over the ranks along ``axes``, which have other parts of the same parameters."""
    group = mesh.group(*axes) if axes else None
    if group is None:
        return value
    total = off_host(value.reshape(-1).clone(), mesh)
    with waiting():
        dist.all_reduce(total, op=op, group=group)
    return total.view_as(value)
