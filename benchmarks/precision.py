"""A step in bfloat16, and compiled: Evener beside plain DDP, Accelerate and Fabric doing the same, 2 CPU ranks.

python -m benchmarks.precision [--turns 12] [--steps 10] [--only bf16]

Each row is one way to compute; in all of them the contenders take turns. ``plain`` is float32, not compiled: what
reduced precision itself gains or costs on this CPU is that row against the others.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import PEERS, Work, ours
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from benchmarks.towers import tower
from evener.distributed.session import Session

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"autocast": True},
    "compiled": {"compiled": True},
    "bf16, compiled": {"autocast": True, "compiled": True},
}


def works(way: dict[str, Any]) -> list[Work]:
    data = TensorDataset(rand(4096, 64), randint(10, (4096,)))
    return [Work("4 blocks of width 256, batch 256", tower, data, 256, **way)]


def measure(turns: int, steps: int, way: str) -> dict[str, dict[str, Timing]]:
    found = {}
    with Session(device="cpu") as session:
        for work in works(WAYS[way]):
            settings = {
                "precision": "bf16" if work.autocast else None,
                "compile": "auto" if work.compiled else None,
            }
            contenders = {**PEERS, "Evener": ours(**settings)}
            found[f"{way}: {work.name}"] = take_turns(contenders, work, session, turns, steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=tuple(WAYS))
    arguments = parser.parse_args()
    results = {}
    for way in [arguments.only] if arguments.only else WAYS:  # Accelerate has one precision for a process
        results |= evener.launch(
            measure, arguments.turns, arguments.steps, way, processes=2, device="cpu", timeout_seconds=600.0
        )[0]
    record("precision", "two CPU ranks", table(results, "plain DDP"))


if __name__ == "__main__":
    main()
