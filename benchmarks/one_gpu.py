"""What a step on one GPU costs beside a plain loop, in alternation: small and large models, float32 and bfloat16; and
with CUDA graphs, where the model is not compiled.

One GPT is told twice. Its scores, transposed for PyTorch's loss, take the kernels for images in a plain loop, and those
for rows in Evener; or both loops hand over rows, so that they run the same kernels.

The plain loop is the one that one writes: a `DataLoader` with pinned memory, copies that do not wait, autocast where
the numbers are bfloat16, a fused AdamW, and no reading of the loss. Evener's engine watches, records and tells as ever.
A turn is timed from one wait for the device to the next.

python -m benchmarks.one_gpu [--turns 10] [--steps 20] [--only MLP]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from benchmarks.contenders import Work
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table
from benchmarks.memory_models import Attention, Block
from benchmarks.results import record
from evener.core.losses import Loss
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.training.engine import Engine

fused_adamw = partial(torch.optim.AdamW, fused=True)
GPU = torch.device("cuda", 0)
PLAIN, GRAPHS = "plain loop", "Evener, CUDA graphs"


@dataclass(frozen=True)
class GpuWork(Work):
    """What is trained, and how its scores are handed to the loss."""

    in_rows: bool = False
    """True for scores (N, T, kinds), one row for each word; False for (N, kinds, T) or (N, kinds)."""

    def mean(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The loss of a plain loop."""
        return (
            F.cross_entropy(scores.flatten(0, -2), targets.flatten())
            if self.in_rows
            else F.cross_entropy(scores, targets)
        )

    def loss(self) -> Loss | nn.Module:
        """The loss of a task."""
        return evener.loss(total=sum_of_rows, count=Tensor.numel) if self.in_rows else nn.CrossEntropyLoss()


def sum_of_rows(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")


class Language(nn.Module):
    """A GPT of ``layers`` blocks: (N, T) words to (N, T, kinds) or (N, kinds, T) scores."""

    def __init__(self, words: int, length: int, width: int, layers: int, in_rows: bool = False) -> None:
        super().__init__()
        self.in_rows = in_rows
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Attention(width, width // 64) for _ in range(layers)))
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.out(self.blocks(self.words(x) + self.places))
        return rows if self.in_rows else rows.transpose(1, 2)


def images(width: int, blocks: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(Block(width) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def works() -> list[GpuWork]:
    rows = TensorDataset(rand(8192, 64), randint(10, (8192,)))
    pictures = TensorDataset(rand(2048, 3, 32, 32), randint(10, (2048,)))
    text = randint(4000, (1024, 513))
    words = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    gpt, settings = partial(Language, 4000, 512, 768, 12), {"autocast": True, "in_rows": True}
    return [
        GpuWork("MLP 64-512-10, batch 64", mlp, rows, 64),
        GpuWork("ResNet of 8 blocks of 128, 32x32, batch 128", partial(images, 128, 8), pictures, 128),
        GpuWork("the same in bf16", partial(images, 128, 8), pictures, 128, autocast=True),
        GpuWork("GPT of 12 layers of 768, 512 words, batch 16, bf16", gpt, words, 16, autocast=True),
        GpuWork("the same, scores in rows", partial(gpt, in_rows=True), words, 16, **settings),
        GpuWork("the same compiled", partial(gpt, in_rows=True), words, 16, compiled=True, **settings),
    ]


def plain(work: GpuWork) -> Iterator[None]:
    torch.manual_seed(0)
    model = work.model().to(GPU)
    computed = torch.compile(model) if work.compiled else model
    optimizer = fused_adamw(model.parameters())
    loader = DataLoader(work.data, work.batch_size, shuffle=True, pin_memory=True, drop_last=True)
    while True:
        for inputs, targets in loader:
            inputs, targets = inputs.to(GPU, non_blocking=True), targets.to(GPU, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=work.autocast):
                value = work.mean(computed(inputs), targets)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def ours(work: GpuWork, session: Session, **more: Any) -> Iterator[None]:
    task = Task(model=work.model, loss=work.loss(), optimizer=fused_adamw, train=work.data)
    settings = more | ({"precision": "bf16"} if work.autocast else {})
    settings |= {"compile": "whole"} if work.compiled else {}
    with Engine(task, session=session, batch_size=work.batch_size, epochs=10**6, **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
            yield


def take(source: Iterator[None], steps: int) -> float:
    torch.accelerator.synchronize(GPU)
    began = time.perf_counter()
    for _ in range(steps):
        next(source)
    torch.accelerator.synchronize(GPU)
    return (time.perf_counter() - began) / steps


def measure(work: GpuWork, session: Session, turns: int, steps: int) -> dict[str, Timing]:
    """All, in turns. A graph of each is recorded before."""
    sources = {PLAIN: plain(work), "Evener": ours(work, session)}
    if not work.compiled:
        sources[GRAPHS] = ours(work, session, cuda_graphs="auto")
    for source in sources.values():
        take(source, steps)
    times = [[take(source, steps) for source in sources.values()] for _ in range(turns)]
    for source in sources.values():
        source.close()  # type: ignore[attr-defined]
    columns = [Timing(list(column)) for column in zip(*times, strict=True)]
    return dict(zip(sources, columns, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    arguments = parser.parse_args()
    with Session(device="cuda") as session:
        chosen = [work for work in works() if arguments.only in work.name]
        found = {work.name: measure(work, session, arguments.turns, arguments.steps) for work in chosen}
    eager = {name: {kind: row[kind] for kind in row if kind != GRAPHS} for name, row in found.items()}
    graphs = {
        name: {kind: row[kind] for kind in (PLAIN, GRAPHS)} for name, row in found.items() if GRAPHS in row
    }
    card = torch.cuda.get_device_name(GPU)
    record("one_gpu", "one GPU", table(eager, PLAIN), beside=card)
    record("one_gpu", "CUDA graphs", table(graphs, PLAIN), beside=card)


if __name__ == "__main__":
    main()
