"""Data in many files, each read from its beginning to its end, with a global order all the same.

The samples of the files are counted once, so each has a number, and an epoch has each of them once on any number of
ranks. A run that was stopped goes on in mid-epoch, on other ranks, without reading what came before.

    python examples/shards.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import evener

FILES = 12


def write_files(folder: Path) -> list[Path]:
    """Writes files of JSON lines, of unequal lengths, if they are not there."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"part-{number:02}.jsonl" for number in range(FILES)]
    for number, path in enumerate(paths):
        rows = torch.randn(20 + number, 4, generator=torch.Generator().manual_seed(number)).tolist()
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
            partial.replace(path)
    return paths


def lines(path: Path) -> Iterator[str]:
    """The samples of a file, as they are read."""
    with path.open() as file:
        yield from file


def decode(line: str) -> tuple[Tensor, Tensor]:
    """Makes an item of a line: only for lines that this rank trains on."""
    x = torch.tensor(json.loads(line))
    return x, x.sum(0, keepdim=True)


def task() -> evener.Task:
    return evener.Task(
        name="shards",
        model=lambda: nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=evener.ShardedDataset(write_files(Path("shards")), lines, decode=decode, together=4, window=16),
        batch_size=20,
        epochs=2,
    )


if __name__ == "__main__":
    summary = evener.fit(task, processes=1).summary
    print(f"{summary.samples} samples in {summary.steps} steps, last loss {summary.final_loss:.2e}")
