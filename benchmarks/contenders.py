"""The same training in Evener and in what a user would use instead, each as an endless iterator of steps.

All contenders live in the same ranks at the same time and take turns, so that a noisy machine is noisy for all. They
get the same model, data, optimizer and global batch, and each is written as its own documentation has it, without
logging.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import evener
from evener.core.config.run_config import RunConfig
from evener.distributed.session import Session


@dataclass(frozen=True)
class Work:
    """What is trained: a model, pairs to train on, and the global batch size."""

    name: str
    model: Callable[[], nn.Module]
    data: Dataset[Any]
    batch_size: int
    lr: float = 1e-3
    autocast: bool = False
    """Whether the model computes in bfloat16, by autocast."""
    compiled: bool = False

    def made(self) -> nn.Module:
        """The model, as its users compile it themselves."""
        model = self.model()
        return torch.compile(model) if self.compiled else model  # type: ignore[return-value]

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)

    def loader(self, **options: Any) -> DataLoader[Any]:
        """This rank's part, with equal shares."""
        return DataLoader(
            self.data, batch_size=self.batch_size // dist.get_world_size(), drop_last=True, **options
        )


Contender = Callable[[Work, Session], Iterator[None]]


def plain_ddp(work: Work, session: Session) -> Iterator[None]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(work.made())
    optimizer, loss_function = work.optimizer(model.parameters()), nn.CrossEntropyLoss()
    sampler: DistributedSampler[Any] = DistributedSampler(work.data)  # type: ignore[arg-type]
    loader = work.loader(sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, work.autocast):
                loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield


def accelerate(work: Work, session: Session) -> Iterator[None]:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if work.autocast else "no")
    model = work.made()
    loader = work.loader(shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, work.optimizer(model.parameters()), loader)
    loss_function = nn.CrossEntropyLoss()
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_function(model(inputs), targets))
            optimizer.step()
            yield


def fabric(work: Work, session: Session) -> Iterator[None]:
    from lightning_fabric import Fabric

    torch.manual_seed(0)
    fabric = Fabric(
        accelerator="cpu",
        devices=session.environment.local_world_size,
        strategy="ddp",
        precision="bf16-mixed" if work.autocast else "32-true",
    )
    fabric.launch()
    model = work.made()
    model, optimizer = fabric.setup(model, work.optimizer(model.parameters()))
    loader = fabric.setup_dataloaders(work.loader(shuffle=True))
    loss_function = nn.CrossEntropyLoss()
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(loss_function(model(inputs), targets))
            optimizer.step()
            yield


def ours(parts: Mapping[str, Any] | None = None, **settings: Any) -> Contender:
    """Evener with these settings, and further parts of the task."""

    def contender(work: Work, session: Session) -> Iterator[None]:
        task = evener.Task(
            model=work.model,
            loss=nn.CrossEntropyLoss(),
            optimizer=work.optimizer,
            train=work.data,
            **(parts or {}),
        )
        config = RunConfig(batch_size=work.batch_size, epochs=10**6, **settings)
        engine = evener.Engine(task, config, session=session)
        for batch in engine.batches():
            engine.step(batch)
            yield

    return contender


def prepared(work: Work, session: Session) -> Iterator[None]:
    """A loop that keeps its shape."""
    torch.manual_seed(0)
    model = work.made()
    given = DataLoader(work.data, work.batch_size, shuffle=True, drop_last=True)
    parts = evener.prepare(
        model, work.optimizer(model.parameters()), given, nn.CrossEntropyLoss(), device="cpu"
    )
    model, optimizer, loader, loss_function = parts
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            yield


_ALL: dict[str, tuple[str, Contender]] = {
    "plain DDP": ("torch", plain_ddp),
    "Accelerate": ("accelerate", accelerate),
    "Fabric": ("lightning_fabric", fabric),
}
PEERS: dict[str, Contender] = {name: made for name, (package, made) in _ALL.items() if find_spec(package)}
"""Those that are installed."""
ABSENT = sorted({*_ALL} - {*PEERS})
