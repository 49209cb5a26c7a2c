"""The strategy of asynchronous training: its options, and what it refuses."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from evener.components.gradients import sparse_weights
from evener.data.sections import Sections
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.strategies.asynchronous.delayed_momentum import check_momentum
from evener.strategies.asynchronous.ledger import Merges, Terms
from evener.strategies.asynchronous.stepper import AsynchronousSteps, AsynchronousSynchronizer
from evener.strategies.base import Strategy
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.synchronizer import Synchronizer


@dataclass(frozen=True)
class Asynchronous(Strategy):
    """Asynchronous training with a parameter server: each rank computes at its own pace, and nobody waits.

    Gradients merge each time those of ``buffer`` more samples are there, from whichever rank, weighted by the terms of
    the loss (buffered asynchronous aggregation: Nguyen et al., 2022, arXiv:2106.06639). With a staleness of 0 and a
    buffer of a batch it is the same training as ``ddp``.
    """

    buffer: int = 0
    """The number of samples in an update of the weights, on average. 0 means those of a batch."""
    staleness: int = 4
    """The largest age of gradients in an update, in versions of the weights. -1 means any."""
    sync_every: int = 100
    """The number of batches after which all ranks meet. The engine takes them in one step."""
    damping: float = 0.0
    """Gradients and their terms weigh ``(1 + age) ** -damping``, with their age in versions: 0 for all alike, at most
    1. This trains more on the samples of fast ranks."""
    delayed_nesterov: int = 0
    """The number of updates in which the momentum of SGD changes once (Liu et al., 2024, arXiv:2401.09135). Together
    they are one step of the optimizer with the mean of their gradients. 0 means that it changes in each."""
    servers: int = 1
    """The number of ranks, from rank 0 on, that each hold a part of the weights and update it."""

    def __post_init__(self) -> None:
        least_of = {"buffer": 0, "staleness": -1, "sync_every": 1, "delayed_nesterov": 0, "servers": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 <= self.damping <= 1:
            raise ConfigurationError(f"damping is {self.damping}; it must be from 0 (off) to 1")

    serves_one_rank: ClassVar[bool] = True

    def on_one_device(self, processes: int) -> Strategy | None:
        if self.staleness or self.buffer:
            raise ConfigurationError(
                f"strategy {self.label!r} trains in another order each time: verify it with staleness=0, which is the "
                "training of one device, or repeat a run from its records with evener verify --replay RUN"
            )
        return replace(self, servers=1)

    def batch_parts(self, world_size: int) -> int:
        return world_size

    @property
    def batches_in_step(self) -> int:
        return self.sync_every

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        asked = {
            "precision fp16, whose loss scale all ranks share: use bf16": settings.precision.is_scaled,
            "micro_batch=auto: give micro_batch a number": settings.fits,
            "update_in_backward": settings.update_in_backward,
            f"compress={settings.compression}": settings.compression is not None,
            f"allreduce={settings.all_reduce}, for gradients go to a server": settings.all_reduce is not None,
            f"offload {settings.offload.words}": bool(settings.offload.kinds),
            f"optimizer_state={settings.optimizer_state}": settings.optimizer_state is not None,
            "a budget of recompute: use recompute=blocks": settings.recompute is not None
            and settings.recompute.is_budget,
        }
        for what in (what for what, is_asked in asked.items() if is_asked):
            raise ConfigurationError(f"strategy {self.label!r} does not go with {what}")
        if self.servers > world_size:
            raise ConfigurationError(
                f"servers is {self.servers}, and there are {world_size} ranks: give at most that many"
            )
        return Layout({"data": world_size})

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.delayed_nesterov:
            check_momentum(optimizer)

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        if learner.task.partition == "sample":
            raise ConfigurationError(
                f"strategy {self.label!r} gives any sample to any rank, and the task's data are partitioned by sample: "
                "let every rank hold all samples, partition='batch'"
            )
        if sparse_weights(model):
            raise ConfigurationError(
                f"strategy {self.label!r} sends dense gradients, and an embedding of the model has sparse ones: build "
                "it with sparse=False, or use ddp"
            )
        if self.servers > 1 and learner.task.penalty is not None:
            raise ConfigurationError(
                f"servers={self.servers} does not go with a penalty, which looks at all weights: use one server"
            )
        settings = learner.settings
        batch_size = settings.batch_size or learner.task.batch_size
        ranks = learner.session.world_size
        learner.rounds = Sections(self.sync_every, batch_size, ranks, settings.micro_batch)
        each, age = batch_size // ranks, ranks - 1 if self.staleness < 0 else min(ranks - 1, self.staleness)
        if 0 < self.buffer < each and age and not learner.session.rank:
            warnings.warn(
                f"buffer={self.buffer} is less than the {each} samples that a rank computes at a time, so each update "
                f"has the gradient of one rank, about {age * each} samples old ({age} in versions): lower the learning "
                "rate, or leave buffer at a batch",
                stacklevel=2,
            )
        return self

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return AsynchronousSynchronizer(learner, self._terms(learner), self.servers)

    def stepper(self, learner: Learner) -> Stepper:
        assert isinstance(learner.rounds, Sections)
        return AsynchronousSteps(learner, learner.rounds, self._terms(learner), servers=self.servers)

    def _terms(self, learner: Learner) -> Terms:
        assert isinstance(learner.rounds, Sections)
        batch_size = learner.rounds.batch_size
        staleness = None if self.staleness < 0 else self.staleness
        return Terms(batch_size, self.buffer or batch_size, staleness, self.damping, self.delayed_nesterov)


@dataclass(frozen=True)
class RecordedAsynchronous(Asynchronous):
    """Repeats asynchronous training on one rank, as its records say that it went on several."""

    recorded: tuple[Merges, ...] = ()
    """The merges of each section."""
    ranks: int = 1
    """The number of ranks that have trained."""

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        super().prepared(model, learner)
        assert isinstance(learner.rounds, Sections)
        learner.rounds = replace(learner.rounds, ranks=self.ranks)
        return self

    def stepper(self, learner: Learner) -> Stepper:
        assert isinstance(learner.rounds, Sections)
        return AsynchronousSteps(learner, learner.rounds, self._terms(learner), self.recorded)
