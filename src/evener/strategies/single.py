"""One device: the reference that every division of the work must match."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from evener.data.batch import Batch, MicroBatch
from evener.errors import ConfigurationError
from evener.hardware.readout import Readout, read
from evener.hardware.stopwatch import stopwatch
from evener.nn.batch_norm import BatchNorm
from evener.runtime.session import Session
from evener.strategies.base import (
    Replica,
    Settings,
    StepOutcome,
    Strategy,
    build_model,
    build_optimizer,
    check_trainable,
    micro_scope,
)
from evener.strategies.pace import Pace
from evener.task import Task
from evener.types import Tree


class Single(Strategy):
    """The whole batch on one device, in micro-batches where asked."""

    def __init__(self, task: Task, session: Session, settings: Settings) -> None:
        super().__init__(task, session, settings)
        self.pace = Pace(stopwatch(session.device), settings.throttle, session.rank)
        self.model = self.prepare(build_model(task, session, settings))
        check_trainable(self.model)
        self.optimizer = build_optimizer(task, self.model)
        self._loose_buffers = list(_loose_buffers(self.model))

    def prepare(self, model: nn.Module) -> nn.Module:
        """What the strategy changes in the model before the optimizer is built."""
        return model

    @cached_property
    def replica(self) -> nn.Module:
        """The model with its loss, as it is called in training."""
        return Replica(self.model, self.task.exact_loss(), self.task.forward)

    def backward(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        replica, before = self.replica, self._buffer_versions()
        totals: list[Readout] = []
        last = batch.micro_batches[-1]
        with self.pace.step(step):
            for micro in batch.micro_batches:
                with micro_scope(micro, step, self.settings) as current, self.exchanging(micro is last):
                    term = replica(micro)
                    totals.append(read(term))
                    current.rewind()
                    (term / divisor()).backward()
            missing = self.complete()
        return StepOutcome(
            total=sum(total.value() for total in totals),
            missing=missing,
            buffers_changed=before != self._buffer_versions(),
            compute_seconds=self.pace.seconds(),
        )

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; gradients are exchanged with the ``last`` one."""
        return nullcontext()

    def complete(self) -> tuple[str, ...]:
        """Ends the rank's own work and the exchange of gradients; names the parameters that it gave none."""
        self.pace.work_done()
        return ()

    def update(self, forget: Iterable[str] = ()) -> None:
        for name in forget:
            self.model.get_parameter(name).grad = None
        self.add_penalty()
        self.clip(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def add_penalty(self) -> None:
        """Adds the gradient of the task's penalty: after the exchange, alike on all ranks, so that it counts once."""
        if self.task.penalty is not None:
            term = self.task.penalty(self.model)
            self.penalty = read(term)
            term.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """There is no other rank."""

    def share_buffers(self, source: int) -> None:
        """There is no other rank."""

    def outputs(self, micro: MicroBatch) -> Tree:
        return self.task.forward(self.model, micro.inputs)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"the checkpoint is of another model or optimizer than the task's: {error}"
            ) from error

    def _buffer_versions(self) -> list[tuple[int, int]]:
        buffers = [module._buffers[name] for module, name in self._loose_buffers]
        return [(id(buffer), buffer._version) for buffer in buffers if buffer is not None]


def _loose_buffers(model: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """Buffers that training may write and nothing keeps equal; those of an exact BatchNorm are equal by themselves."""
    for module in model.modules():
        if not isinstance(module, BatchNorm):
            yield from ((module, name) for name, buffer in module._buffers.items() if _is_data(buffer))


def _is_data(buffer: Tensor | None) -> bool:
    return isinstance(buffer, torch.Tensor)
