"""What ranks on several hosts find out about each other, and what they train: a script for ``evener run``."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import evener
from evener.collectives.registry import make
from evener.errors import ConfigurationError
from evener.runtime.hosts import hosts_of
from evener.runtime.session import Session

STEPS = 4


def refusal(name: str) -> str:
    try:
        make(name, timeout_seconds=20)
    except ConfigurationError as error:
        return str(error)
    return ""


def summed(name: str | None) -> tuple[str, bool]:
    """The name of an all-reduce, and whether it summed right."""
    with make(name, timeout_seconds=20) as all_reduce:
        tensor = torch.full((1000,), dist.get_rank() + 1.0)
        all_reduce(tensor).wait()
        size = dist.get_world_size()
        return all_reduce.name, bool((tensor == size * (size + 1) / 2).all())


def main() -> None:
    with Session(device="cpu", timeout_seconds=40) as session:
        assert session.world is not None
        found = {
            "hosts": hosts_of(session.world),
            "sums": [summed(name) for name in (None, "ring-tree", "two-level")],
            "refusal": refusal("shared-memory"),
        }
    settings = {"device": "cpu", "steps": STEPS, "allreduce": "two-level", "timeout_seconds": 40.0}
    summary = evener.fit("digits", show=False, **settings).summary
    print(json.dumps(found | {"loss": summary.final_loss, "metrics": summary.metrics}), flush=True)


if __name__ == "__main__":
    main()
