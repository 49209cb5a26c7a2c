"""Gathers rows, of which each rank may have another number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.message_types import sendable


def rows_of_all(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Gathers (rows of this rank, ...) to (rows of all ranks, ...), in the order of the ranks.

    All ranks must call this together, with the same ``counts``: the number of rows of each rank. Messages are padded to
    the largest count.
    """
    filled = rows.new_zeros((max(counts), *rows.shape[1:]))
    filled[: len(rows)] = rows
    found = gathered(filled, len(counts), group)
    return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])


def gathered(tensor: Tensor, ranks: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gathers the tensors of all ranks, which must have the same shape and type."""
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(list(map(sendable, found)), sendable(tensor), group=group)
    return found
