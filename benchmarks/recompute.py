"""What a budget costs: a step's peak and its time with blocks computed again, beside all kept and all computed again.

    python -m benchmarks.recompute [--models NAME;NAME] [--budget 60%] [--turns N] [--steps N]

One rank, one thread. The three take turns, steps each, and ratios are those of turns next to each other. Peaks are
counted in a further step of each, by an accounting that sees all tensors. Aims: the peak within the budget, at no more
than 1.35 of the time with all blocks kept, and less than with all computed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.engines import Contender, in_turns
from benchmarks.interleaved import Timing, timed
from benchmarks.memory_models import WORDS, Attention, Block, Words
from benchmarks.results import Table, Value, cell, record
from evener.core.task.task import Task

BLOCKS, KINDS = 12, 10


def gpt(width: int = 128, length: int = 64, batch_size: int = 16) -> Task:
    """Twelve layers of a transformer that predict the next word."""
    words = torch.randint(WORDS, (64, length + 1), generator=torch.Generator().manual_seed(1))
    layers = lambda: Words([Attention(width, 4) for _ in range(BLOCKS)], width)  # noqa: E731
    return _task("GPT", layers, TensorDataset(words[:, :-1], words[:, 1:]), batch_size)


def resnet(width: int = 32, batch_size: int = 32) -> Task:
    """Twelve blocks of two convolutions with BatchNorm."""
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    layers = lambda: nn.Sequential(  # noqa: E731
        *(nn.Conv2d(3, width, 3, padding=1), nn.Sequential(*(Block(width) for _ in range(BLOCKS)))),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, KINDS)),
    )
    return _task("ResNet", layers, TensorDataset(images, torch.arange(64) % KINDS), batch_size)


def _task(name: str, model: Callable[[], nn.Module], data: TensorDataset, batch_size: int) -> Task:
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    return Task(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=adamw, train=data, batch_size=batch_size, name=name
    )


MODELS = {"GPT": gpt, "ResNet": resnet}


def compared(
    task: Task, budget: str, turns: int, steps: int
) -> tuple[dict[str, Timing], dict[str, int], str]:
    """Times and peaks of each, and what the budget's engine says."""
    ways = {"all kept": None, budget: budget, "all again": "blocks"}
    contenders = {name: Contender(task, recompute=how) for name, how in ways.items()}
    times = in_turns(contenders, turns, steps)
    peaks = {name: each.peak() for name, each in contenders.items()}
    said = contenders[budget].engine.recomputing.description
    for each in contenders.values():
        each.close()
    return times, peaks, said


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", type=lambda text: text.split(";"), default=list(MODELS), metavar="NAME;NAME"
    )
    parser.add_argument("--budget", default="60%", metavar="HOW")
    parser.add_argument("--turns", type=int, default=15, metavar="N")
    parser.add_argument("--steps", type=int, default=1, metavar="N")
    given: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.models:
        times, peaks, said = compared(MODELS[name](), given.budget, given.turns, given.steps)
        rows: list[list[Value]] = []
        for way, taken in times.items():
            share = cell(peaks[way] / peaks["all kept"])
            rows.append([way, cell(peaks[way] / 2**20, "MiB"), share, timed(taken, times["all kept"])])
        columns = ["blocks", "peak", "of all kept", "a step"]
        record("recompute", f"{name}, {BLOCKS} blocks", Table(columns, rows, "time over that of all kept"))
        print(said, flush=True)


if __name__ == "__main__":
    main()
