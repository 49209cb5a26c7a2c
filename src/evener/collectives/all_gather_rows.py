"""Rows of which each rank has as many as it likes, gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def rows_of_all(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """(rows of all ranks, ...) from (rows of this rank, ...), in the order of the ranks, which all know ``counts``.

    Filled up to the most of them on the way. A collective call.
    """
    filled = rows.new_zeros((max(counts), *rows.shape[1:]))
    filled[: len(rows)] = rows
    found = gathered(filled, len(counts), group)
    return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])


def gathered(tensor: Tensor, ranks: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Tensors of one shape and type of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(found, tensor, group=group)
    return found
