"""What offload saves and costs: a step's peak and its time with state and activations in files, beside all in memory.

    python -m benchmarks.offload [--models NAME;NAME] [--to DIR] [--turns N] [--steps N]

One rank, one thread, AdamW. All take turns, steps each, and ratios are those of turns next to each other. Peaks are
counted in a further step of each, by an accounting that sees all tensors but those in mapped files, which the system
writes to the disk when memory is short. Here it is not: times are those of copies into the system's cache.
``recompute=blocks`` is what can be done instead of keeping activations in files.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import Contender, in_turns
from benchmarks.interleaved import Timing, timed
from benchmarks.recompute import gpt, resnet
from benchmarks.results import Table, Value, cell, record
from evener.core.task.task import Task

MODELS = {"GPT": gpt, "ResNet": lambda: resnet(32, 8)}
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "optimizer": {"offload": "optimizer"},
    "activations": {"offload": "activations"},
    "both": {"offload": "optimizer,activations"},
    "recompute blocks": {"recompute": "blocks"},
}


def compared(task: Task, directory: Path, turns: int, steps: int) -> dict[str, tuple[Timing, int, int]]:
    """Of each way its times, its peak, and the bytes in files."""
    contenders = {
        name: Contender(task, **settings, **({"offload_to": directory} if "offload" in settings else {}))
        for name, settings in WAYS.items()
    }
    times = in_turns(contenders, turns, steps)
    found = {}
    for name, each in contenders.items():
        outside = sum(each.engine.learner.offloaded.peaks.values())
        found[name] = times[name], each.peak(), outside
        each.close()
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", type=lambda text: text.split(";"), default=list(MODELS), metavar="NAME;NAME"
    )
    parser.add_argument("--to", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR")
    parser.add_argument("--turns", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=1, metavar="N")
    given: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.models:
        found = compared(MODELS[name](), given.to, given.turns, given.steps)
        rows: list[list[Value]] = []
        for way, (times, peak, outside) in found.items():
            sizes = [cell(each / 2**20, "MiB") if each else None for each in (peak, outside)]
            rows.append([way, *sizes, timed(times, found["kept"][0])])
        columns = ["in files", "peak", "bytes in files", "a step"]
        record("offload", name, Table(columns, rows, "time over that of all in memory"))


if __name__ == "__main__":
    main()
