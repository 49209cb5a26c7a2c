"""Strategies that divide the model against PyTorch's own engines, written by hand for the same model, 2 CPU ranks.

    python -m benchmarks.strategies [--turns 10] [--steps 10] [--only sharded,tensor,pipeline]

========  ===================================================================================================
sharded   ``fully_shard`` around every block and the whole
tensor    ``parallelize_module`` with ``ColwiseParallel`` and ``RowwiseParallel`` for the two layers of every block
pipeline  ``PipelineStage`` and ``Schedule1F1B``, cut in the middle, with as many micro-batches
========  ===================================================================================================

By hand there is no data loader that several ranks share, no clipping, no check of losses, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import evener
from benchmarks.contenders import Contender, Work, ours
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from benchmarks.sharded import plain_fsdp
from evener.distributed.session import Session
from evener.strategies import Pipeline, Sharded, TensorParallel

DEPTH, CLASSES, MICROS = 6, 10, 4


def works() -> list[Work]:
    return [_work(256, 64), _work(512, 128)]


def _work(width: int, batch: int) -> Work:
    generator = torch.Generator().manual_seed(1)  # ranks that compute the same samples must have the same
    inputs, targets = torch.rand(1024, width, generator=generator), torch.arange(1024) % CLASSES
    data = TensorDataset(inputs, targets)
    return Work(f"{DEPTH} blocks of width {width}, batch {batch}", lambda: blocks(width), data, batch)


def blocks(width: int) -> nn.Module:
    """Pairs of layers, the hidden one four times as wide, and a head."""
    pairs = (
        nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        for _ in range(DEPTH)
    )
    return nn.Sequential(*pairs, nn.Linear(width, CLASSES))


def _same_batches(work: Work) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Whole batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        work.data, batch_size=work.batch_size, shuffle=True, drop_last=True, generator=generator
    )
    return itertools.chain.from_iterable(loader for _ in itertools.count())


def plain_tensor(work: Work, session: Session) -> Iterator[None]:
    torch.manual_seed(0)
    model, mesh = work.model(), init_device_mesh("cpu", (session.world_size,))
    for block in list(model.children())[:-1]:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    divided = [p for block in list(model.children())[:-1] for p in block.parameters()]
    whole = list(model[-1].parameters())  # type: ignore[index]
    # Groups apart: one call for many parameters cannot mix DTensors and others.
    optimizers = [work.optimizer(divided), work.optimizer(whole)]
    loss_function = nn.CrossEntropyLoss()
    for inputs, targets in _same_batches(work):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield


def plain_pipeline(work: Work, session: Session) -> Iterator[None]:
    torch.manual_seed(0)
    layers, rank, world_size = list(work.model().children()), dist.get_rank(), session.world_size
    cuts = [len(layers) * stage // world_size for stage in range(world_size + 1)]
    own = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]])
    stage = PipelineStage(own, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROS, loss_fn=nn.CrossEntropyLoss())
    optimizer = work.optimizer(own.parameters())
    for inputs, targets in _same_batches(work):
        optimizer.zero_grad()
        given: Any = (inputs,) if rank == 0 else ()
        schedule.step(*given, target=targets if rank == world_size - 1 else None)
        optimizer.step()
        yield


CHOICES: dict[str, tuple[str, Contender, Contender]] = {
    "sharded": ("FSDP2", plain_fsdp, ours(strategy=Sharded())),
    "tensor": ("DTensor", plain_tensor, ours(strategy=TensorParallel())),
    "pipeline": (
        "1F1B pipelining",
        plain_pipeline,
        ours(strategy=Pipeline(schedule="1f1b", microbatches=MICROS, cut="3")),
    ),
}
BY_HAND = "PyTorch's engine, by hand"


def measure(name: str, turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    _, plain, evener_ = CHOICES[name]
    contenders: Mapping[str, Contender] = {BY_HAND: plain, "Evener": evener_}
    torch.set_num_threads(1)
    with Session(device="cpu") as session:
        return {
            f"{name}, {work.name}": take_turns(contenders, work, session, turns, steps) for work in works()
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default=",".join(CHOICES))
    arguments = parser.parse_args()
    for name in arguments.only.split(","):
        results = evener.launch(measure, name, arguments.turns, arguments.steps, processes=2, device="cpu")[0]
        record("strategies", f"{name} beside {CHOICES[name][0]}", table(results, BY_HAND))


if __name__ == "__main__":
    main()
