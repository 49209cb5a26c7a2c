"""Strategies that are right but for one thing each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.strategies import (
    Ddp,
    Learner,
    Mesh,
    Plain,
    Stepper,
    StrategySettings,
    Synchronizer,
)
from evener.strategies.ddp import DdpSum


class Sum(DdpSum):
    """That of ``ddp``; those below change what they name."""

    def __init__(self, learner: Learner) -> None:
        group = learner.mesh.group("data")
        assert group is not None
        super().__init__(learner, group)
        self.learner = learner

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.learner.model.parameters() if p.grad is not None]


class Averaged(Sum):
    def complete(self) -> tuple[str, ...]:
        missing = super().complete()
        for gradient in self.gradients:
            gradient /= self.learner.data.degree
        return missing


class FirstTwice(Sum):
    """The samples of rank 0 count twice."""

    def wrap(self, replica: nn.Module) -> nn.Module:
        ddp = super().wrap(replica)
        factor = 2 if self.learner.session.rank == 0 else 1
        ddp.register_forward_hook(lambda module, inputs, total: _scaled(total, factor))
        return ddp


def _scaled(total: Tensor, factor: int) -> Tensor:
    total.register_hook(lambda gradient: gradient * factor)
    return total


class BuffersKept(Sum):
    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        pass


class PenaltyOnEach(Sum):
    """As if the penalty were a part of each rank's loss."""

    def complete(self) -> tuple[str, ...]:
        missing = super().complete()
        penalty = self.learner.task.penalty
        if penalty is not None:
            for _ in range(self.learner.data.degree - 1):
                penalty(self.learner.model).backward()
        return missing


class LocalNorm(Sum):
    """Clips what the rank has before the sum."""

    def micro_batch(self, last: bool) -> Any:
        self.clip = self.learner.settings.clip_norm
        return super().micro_batch(last=False)

    def complete(self) -> tuple[str, ...]:
        parameters = list(self.learner.model.parameters())
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip / self.learner.data.degree)
        self.sum_gradients(parameters)
        return ()


class Forgetting(Sum):
    """Steps with an optimizer of its own, of which no checkpoint knows."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        hidden = learner.optimizer
        shown = learner.task.optimizer([p for group in hidden.param_groups for p in group["params"]])
        shown.step = hidden.step  # type: ignore[method-assign]
        learner.optimizer = shown


class Leaking(Sum):
    kept: list[nn.Module] = []  # noqa: RUF012

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self.kept.append(learner.model)


class Silent(Sum):
    """Says nothing of gradients that are no numbers, which are those of all ranks after the sum."""

    def soundness(self) -> tuple[Any, ...]:
        return ()


class OutOfOrder(Plain):
    def outputs(self, micro: Any) -> Any:
        return super().outputs(micro).flip(0)


class WithDdp(Ddp):
    kind: type[Sum] = Sum

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return self.kind(learner)


class Averages(WithDdp):
    kind = Averaged


class CountsTwice(WithDdp):
    kind = FirstTwice


class KeepsBuffers(WithDdp):
    kind = BuffersKept


class PenaltyPerRank(WithDdp):
    kind = PenaltyOnEach


class ClipsLocally(WithDdp):
    kind = LocalNorm


class ForgetsTheOptimizer(WithDdp):
    kind = Forgetting


class KeepsTheModel(WithDdp):
    kind = Leaking


class NamesNobody(WithDdp):
    kind = Silent


class OwnBatchNorm(WithDdp):
    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        return model


class DropsTheNone(WithDdp):
    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        model.register_forward_pre_hook(_without_none, with_kwargs=True)
        return super().parallelize(model, mesh, settings)


def _without_none(module: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {name: torch.empty(0) if value is None else value for name, value in named.items()}


class Flips(WithDdp):
    def stepper(self, learner: Learner) -> Stepper:
        return OutOfOrder(learner)
