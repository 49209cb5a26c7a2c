"""Sums sparse tensors over ranks. gloo can do that for CPU tensors; NCCL cannot, so GPU tensors are gathered.

Each rank may have other rows, and another number of them. The ranks exchange these numbers, gather indices and values
that are padded to the largest number, and add all rows in the order of the ranks::

    rank 0   rows 3 7        ──┐ filled up    ┌─▶ 3 7 2 - ─▶ sum by row, 2 3 7
    rank 1   rows 2          ──┴──────────────┴─▶ the same

So the sum of a table of a million rows costs only its few nonzero rows, times the number of ranks. The host waits for
the numbers of rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.all_gather_rows import gathered, rows_of_all


def is_native(tensor: Tensor) -> bool:
    """Returns True if PyTorch's own all-reduce accepts a tensor of this layout on this device."""
    return tensor.layout is torch.strided or tensor.device.type == "cpu"


@torch.no_grad()
def sum_gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replaces a sparse ``tensor`` (COO, any sparse and dense dimensions) by its sum over the ranks, and returns it.
    The sum is bitwise the same on all ranks. All ranks must call this together."""
    own = tensor.coalesce()
    ranks = dist.get_world_size(group)
    count = torch.tensor([own.indices().shape[1]], device=own.device)
    counts = torch.cat(gathered(count, ranks, group)).tolist()
    indices = rows_of_all(own.indices().t(), counts, group)
    values = rows_of_all(own.values(), counts, group)
    total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False).coalesce()
    return tensor.zero_().add_(total)
