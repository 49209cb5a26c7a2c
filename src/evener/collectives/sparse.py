"""The sum of sparse tensors over ranks. gloo has one for a CPU's; NCCL has none, so that theirs are gathered.

Each rank has rows of its own, and as many as it likes. All learn how many the others have, gather indices and values
that are filled up to the most of them, and add all rows in the order of the ranks::

    rank 0   rows 3 7        ──┐ filled up    ┌─▶ 3 7 2 - ─▶ sum by row, 2 3 7
    rank 1   rows 2          ──┴──────────────┴─▶ the same

So a table of a million rows costs what its few rows take, times the ranks. The host waits for the numbers of rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.all_gather_rows import gathered, rows_of_all


def is_native(tensor: Tensor) -> bool:
    """Whether PyTorch's own all-reduce takes a tensor of this layout on this device."""
    return tensor.layout is torch.strided or tensor.device.type == "cpu"


@torch.no_grad()
def sum_gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replaces a sparse ``tensor`` (COO, of any sparse and dense dimensions) by its sum over the ranks, the same bits
    on all; returns it."""
    own = tensor.coalesce()
    ranks = dist.get_world_size(group)
    count = torch.tensor([own.indices().shape[1]], device=own.device)
    counts = torch.cat(gathered(count, ranks, group)).tolist()
    indices = rows_of_all(own.indices().t(), counts, group)
    values = rows_of_all(own.values(), counts, group)
    total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False).coalesce()
    return tensor.zero_().add_(total)
