"""Any function on every rank, from a notebook or a script: ``evener.launch``.

The function may be a lambda or a function of a notebook. What the ranks return comes back as a list.

    python examples/launch.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import evener


def add_ranks(scale: float) -> tuple[int, float]:
    """The rank, and a sum over all ranks."""
    with evener.Session() as session:
        value = torch.tensor([scale * (session.rank + 1)])
        if session.world_size > 1:
            dist.all_reduce(value)
        return session.rank, value.item()


if __name__ == "__main__":
    for rank, value in evener.launch(add_ranks, 10.0, processes=2):
        print(f"rank {rank}: {value}")
