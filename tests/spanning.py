"""What ranks on several hosts find out about each other, and what they train: a script for ``evener run``."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import evener
from evener.collectives.registry import make
from evener.distributed import session as session_module
from evener.distributed.hosts import hosts_of
from evener.distributed.session import Session
from evener.errors import ConfigurationError

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


def of_two_makers() -> Any:
    """The hosts' devices are of kinds that cannot meet, as those of two makers."""
    mine = f"library of host {os.environ['GROUP_RANK']}"
    return mock.patch.object(session_module, "library_of", return_value=mine)


def mixed_refusal(**settings: Any) -> str:
    try:
        with of_two_makers():
            evener.fit("digits", show=False, device="mixed", steps=1, timeout_seconds=40.0, **settings)
    except ConfigurationError as error:
        return str(error)
    return ""


def main() -> None:
    with Session(device="cpu", timeout_seconds=40) as session:
        assert session.world is not None
        found = {
            "hosts": hosts_of(session.world),
            "sums": [summed(name) for name in (None, "ring-tree", "two-level")],
            "refusal": refusal("shared-memory"),
        }
    found["refusals"] = [
        mixed_refusal(**settings) for settings in ({"strategy": "sharded"}, {"allreduce": "ring"})
    ]
    with of_two_makers():
        summary = evener.fit("digits", show=False, device="mixed", steps=STEPS, timeout_seconds=40.0).summary
    trained = {"loss": summary.final_loss, "metrics": summary.metrics, "all_reduce": summary.allreduce}
    print(json.dumps(found | trained), flush=True)


if __name__ == "__main__":
    main()
