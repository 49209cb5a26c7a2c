"""Rows with owners (ZeRO 1 and 2) against plain DDP and plain FSDP2, on equal and on really unequal ranks.

    python -m benchmarks.sharded [--turns 10] [--steps 10] [--only equal,cores,memory]

======  ==============================================================================================================
equal   two ranks with a core each: what it costs to keep gradients and optimizer in parts
cores   three ranks on two cores, one alone and two sharing, by processor affinity: shares of samples by speed, and
        rows in parts of their own; FSDP2 has equal shares of both
memory  bytes of the optimizer's state and of summed gradients on each rank, over those that were asked for
======  ==============================================================================================================

Plain FSDP2 is ``fully_shard`` around every layer and the whole, as its documentation has it: it also divides the
weights, which ZeRO 1 and 2 do not.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler, TensorDataset

import evener
from benchmarks import balance
from benchmarks.contenders import Contender, Work, ours, plain_ddp
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import Table, Value, cell, record
from evener.core.config.run_config import RunConfig
from evener.distributed.session import Session
from evener.strategies.sharded.zero import Zero
from evener.training.engine import Engine

OWNS = "2,1,1"
"""Of the three ranks on two cores."""


def works() -> list[Work]:
    narrow = TensorDataset(rand(512, 1024), randint(10, (512,)))
    return [
        Work("25M parameters, 24 layers, batch 16", lambda: layers(*[1024] * 25), narrow, 16),
        Work("25M parameters, 24 layers, batch 256", lambda: layers(*[1024] * 25), narrow, 256),
        balance.work("convolutions, few weights"),
    ]


def layers(*widths: int) -> nn.Module:
    """An MLP."""
    pairs = [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]
    return nn.Sequential(*pairs, nn.Linear(widths[-1], 10))


def plain_fsdp(work: Work, session: Session) -> Iterator[None]:
    torch.manual_seed(0)
    model = work.model()
    mesh = init_device_mesh("cpu", (session.world_size,))
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, loss_function = work.optimizer(model.parameters()), nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(work.data)  # type: ignore[arg-type]
    loader = work.loader(sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            yield


PLAIN: dict[str, Contender] = {"plain DDP": plain_ddp, "plain FSDP2": plain_fsdp}


def equal(turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    contenders: dict[str, Contender] = {
        **PLAIN,
        "Evener ddp": ours(),
        "ZeRO 1": ours(strategy=Zero(stage=1)),
        "ZeRO 2": ours(strategy=Zero()),
        "ZeRO 2, native": ours(strategy=Zero(), allreduce="native"),
    }
    with Session(device="cpu") as session:
        return {work.name: take_turns(contenders, work, session, turns, steps, 4) for work in works()}


def cores(turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    """One rank alone on a core, two that share one."""
    balance.pin(int(os.environ["RANK"]))
    contenders: dict[str, Contender] = {
        **PLAIN,
        "ZeRO 2, equal": ours(strategy=Zero(), balance="equal"),
        f"ZeRO 2, auto, owns {OWNS}": ours(strategy=Zero(shard_sizes=OWNS), balance="auto"),
    }
    with Session(device="cpu") as session:
        return {
            work.name: take_turns(contenders, work, session, turns, steps, balance.WARM_UP)
            for work in works()[1:]
        }


def memory(shard_sizes: str) -> tuple[float, float]:
    """Of this rank: the bytes that it holds over those that it was to hold, of gradients and of the optimizer."""
    rank, parts = int(os.environ["RANK"]), [float(part) for part in shard_sizes.split(",")]
    work, seen = works()[0], 0

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal seen
        seen = sum(p.grad.nbytes for group in optimizer.param_groups for p in group["params"])

    task = evener.Task(
        model=work.model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p),
        train=work.data,
    )
    config = RunConfig(strategy=Zero(shard_sizes=shard_sizes), batch_size=16, steps=2, device="cpu")
    with Engine(task, config) as engine:
        engine.learner.optimizer.register_step_pre_hook(look)
        for batch in engine.batches():
            engine.step(batch)
        asked = sum(t.nbytes for t in engine.learner.tensors().values()) * parts[rank] / sum(parts)
        state = engine.learner.optimizer.state.values()
        kept = sum(t.nbytes for entries in state for t in entries.values() if t.ndim)
        return seen / asked, kept / (2 * asked)


def _launched(function: Any, *args: Any, processes: int) -> list[Any]:
    return evener.launch(function, *args, processes=processes, device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="equal,cores,memory")
    arguments = parser.parse_args()
    turns, steps, chosen = arguments.turns, arguments.steps, arguments.only.split(",")
    kinds = {
        "equal": ("two ranks with a core each", equal, 2),
        "cores": ("three ranks on two cores, one alone and two sharing", cores, 3),
    }
    for name in [each for each in kinds if each in chosen]:
        title, measure, processes = kinds[name]
        found: Mapping[str, Any] = _launched(measure, turns, steps, processes=processes)[0]
        record("sharded", title, table(found, "plain FSDP2"))
    rows: list[list[Value]] = []
    for shard_sizes in ("1,1", "2,1", "3,1,1") if "memory" in chosen else ():
        ratios = _launched(memory, shard_sizes, processes=shard_sizes.count(",") + 1)
        rows += [[f"{shard_sizes}, rank {rank}", *map(cell, of_rank)] for rank, of_rank in enumerate(ratios)]
    if rows:
        columns = ["owners", "summed gradients", "optimizer's state"]
        record("sharded", "bytes that a rank holds, over those that it was to hold", Table(columns, rows))


if __name__ == "__main__":
    main()
