"""How one training step runs over the ranks: the interface, and what every strategy shares.

A strategy owns placement, exchange and update, never launching, data or files. A step is two calls, so that what the
ranks have to tell each other (was a loss not finite, did some parameter get no gradient anywhere) can travel between
them::

    engine:    divisor ──▶ backward(batch, divisor) ──▶ outcome ══ one tiny message ══▶ update(forget)
    strategy:              micro-batches: forward, backward, gradients summed             clip, optimizer

The gradients that ``update`` finds are those of ``sum of total / divisor`` over all samples of the global batch.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.balance.emulate import Throttle
from evener.data.batch import Batch, MicroBatch
from evener.errors import LossError, TaskError
from evener.hardware.readout import Readout, read
from evener.loss import Loss
from evener.nn.dropout import name_dropouts
from evener.nn.scope import Scope, scope
from evener.runtime.session import Session
from evener.task import Task
from evener.types import Forward, Tree


@dataclass(frozen=True)
class Settings:
    """What the user may set about any strategy."""

    seed: int = 0
    dtype: torch.dtype | None = None
    """Type of the weights and of floating inputs and targets; None leaves them as they are made."""
    clip_norm: float | None = None
    """Largest global norm of the gradients of one step."""
    all_reduce: str | None = None
    """Name of the all-reduce that sums gradients; None for the best that the ranks are known to have."""
    compression: str | None = None
    """Name of a compression of gradients; None for none."""
    bucket_bytes: int | None = None
    """Size of the buckets in which gradients are exchanged while backward runs; None to have it chosen."""
    throttle: Throttle | None = None
    """Emulation of unequal devices; None for none."""
    weights: Sequence[float] | None = None
    """Parts of the ranks, where the user fixed them: a strategy that divides the model divides it so."""


@dataclass(frozen=True)
class StepOutcome:
    """What one rank knows after its part of a step, before the update."""

    total: float
    """Sum of the loss's terms over this rank's samples."""
    missing: tuple[str, ...]
    """Names of the parameters to which no sample of this rank gave a gradient."""
    buffers_changed: bool
    """Whether the forward pass wrote to buffers that the strategy does not keep equal by itself."""
    compute_seconds: float
    """Time of this rank's own work, waiting for others left out."""

    @property
    def missing_code(self) -> float:
        """0 where nothing is missing, else a number that is equal only for equal sets of names."""
        return float(1 + zlib.crc32("\n".join(self.missing).encode())) if self.missing else 0.0


class Replica(nn.Module):
    """The model and its loss as one module: from a micro-batch to the sum of its terms.

    That the loss is inside lets a placeholder run through every module and hook like any sample, and count for
    nothing.
    """

    def __init__(self, model: nn.Module, loss: Loss, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._forward = forward

    def forward(self, micro: MicroBatch) -> Tensor:
        total = self._loss.total(self._forward(self.model, micro.inputs), micro.targets)
        if not isinstance(total, Tensor) or total.numel() != 1:
            shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise LossError(f"the loss's total is {shape}; it must be one number, the sum over the samples")
        return total if micro.weight else total * 0


class Strategy(ABC):
    """How one training step runs over the ranks of a session.

    Places the model, then builds the optimizer from the parameters in their places.
    """

    def __init__(self, task: Task, session: Session, settings: Settings) -> None:
        self.task = task
        self.session = session
        self.settings = settings
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.penalty: Readout = read(0.0)
        """The task's penalty in the last update."""

    @property
    def data_ranks(self) -> Sequence[int]:
        """A rank for each part of a batch, in order: all ranks, or where some compute a part together, one of them."""
        return range(self.session.world_size)

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank computes."""
        return self.session.rank

    def portion(self, dataset: Any) -> Any:
        """The data set with no more of each item than this rank needs."""
        return dataset

    @abstractmethod
    def backward(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        """Forward and backward of this rank's share; when it returns, the exchange is done too.

        ``divisor`` is asked for after the first forward pass, so that the message that brings it travels meanwhile.
        """

    @abstractmethod
    def update(self, forget: Iterable[str] = ()) -> None:
        """Clips, steps the optimizer and clears the gradients; ``forget`` names parameters without any gradient."""

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clips the gradients of ``parameters`` to the global norm of the settings, if there is one."""
        if self.settings.clip_norm is not None:
            clip_gradients(parameters, self.settings.clip_norm)

    @abstractmethod
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums gradients that a loop of the user's own left in ``parameters``, over the ranks."""

    @abstractmethod
    def share_buffers(self, source: int) -> None:
        """Gives all ranks the buffers of rank ``source``."""

    @abstractmethod
    def outputs(self, micro: MicroBatch) -> Tree:
        """The model's outputs, in evaluation."""

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under all their names, as one device would hold them; all ranks call it together."""
        return named_tensors(self.model)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer as one device would hold them: any strategy accepts any other's."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave."""

    def close(self) -> None:  # noqa: B027 (most own nothing)
        """Gives back what the strategy owns."""

    def place(self, batch: Batch) -> Batch:
        """The batch in the floating type of the run."""
        dtype = self.settings.dtype
        return batch if dtype is None else batch.map(lambda leaf: _as_floating(leaf, dtype))


def build_model(task: Task, session: Session, settings: Settings) -> nn.Module:
    """The model with the same first weights on every rank, on this rank's device."""
    torch.manual_seed(settings.seed % 2**63)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"Task.model returned {type(model).__name__}; it must return a torch.nn.Module")
    torch.manual_seed(((settings.seed << 20) + session.rank) % 2**63)
    name_dropouts(model)
    return model.to(device=session.device, dtype=settings.dtype)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as the model holds them, under every name by which they are known."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def build_scheduler(
    task: Task, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The task's scheduler, if it has one.

    Raises:
        TaskError: If it is one that has to be told a metric.
    """
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TaskError(
            "Task.scheduler is a ReduceLROnPlateau, which has to be told a metric: leave it out of the task, and call "
            "it in a loop of your own with what engine.evaluate() returns"
        )
    return scheduler


def build_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the parameters where they are.

    Raises:
        TaskError: If the task built something else.
    """
    optimizer = task.optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"Task.optimizer returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
        )
    return optimizer


def _as_floating(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor | None = None) -> None:
    """Scales the gradients, dense and sparse, so that their global 2-norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, which takes no sparse gradients. ``norm`` is the global norm where that is of
    more than these gradients.
    """
    given = list(parameters)
    factor = (max_norm / ((gradient_norm(given) if norm is None else norm) + 1e-6)).clamp(max=1.0)
    for value in map(gradient_values, _with_gradient(given)):
        value.mul_(factor.to(value.device))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together."""
    return nn.utils.get_total_norm([gradient_values(parameter) for parameter in _with_gradient(parameters)])


def gradient_values(parameter: nn.Parameter) -> Tensor:
    """The numbers of a parameter's gradient, each place counted once."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def _with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def check_trainable(model: nn.Module) -> None:
    """Raises:
    TaskError: If there is nothing to train.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(f"the model {type(model).__name__} has no parameter that requires a gradient")


def micro_scope(micro: MicroBatch, step: int, settings: Settings) -> AbstractContextManager[Scope]:
    """Tells the modules of :mod:`evener.nn` which samples are being computed."""
    return scope(micro.samples, step, settings.seed, micro.weight)
