"""The parts of a strategy: its settings, the stepper that runs the micro-batches, and what they use of a batch.

The gradient synchronizer is in :mod:`evener.strategies.synchronizer`.
"""

from __future__ import annotations

import dataclasses
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from evener.balance.throttle import Throttle
from evener.collectives.ddp.buckets import DEFAULT_BUCKET_NBYTES
from evener.components.amp.policy import Precision
from evener.components.compile import Compiling
from evener.components.memory_limits.limits import MemoryLimits
from evener.components.state_dict import Cut, HeldState
from evener.core.config.exact_bits import ExactBits
from evener.core.config.offload import Offload
from evener.core.config.recompute import Recompute
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.hardware.async_read import Readout, ReadyValue
from evener.hardware.memory.step_usage import NOTHING, Lap, MemoryUse


@dataclass(frozen=True)
class StrategySettings:
    """The settings that every strategy accepts."""

    seed: int = 0
    dtype: torch.dtype | None = None
    """Data type of the weights and of floating-point inputs and targets. None keeps the types of the model and the
    data."""
    bits: ExactBits | None = None
    """How batches are cut by position, if the weights are to be the same to the last bit on any division. None means
    sums that are equal to rounding."""
    audit: float = 0.0
    """The part of all blocks that a second rank computes as well, to compare."""
    precision: Precision = field(default_factory=Precision)
    """The precision in which the model computes."""
    compiling: Compiling = field(default_factory=Compiling)
    """How the model is compiled with torch.compile."""
    fits: bool = False
    """True if each rank chooses the size of its micro-batches by its free memory (``micro_batch=auto``)."""
    limits: MemoryLimits | None = None
    """Limits on the memory that the ranks may use. None means no limits."""
    recompute: Recompute | None = None
    """The blocks of the model whose activations are recomputed in backward (activation checkpointing). None means
    none."""
    offload: Offload = field(default_factory=Offload)
    """What is offloaded from the device to host memory or disk."""
    optimizer_state: str | None = None
    """``8bit`` keeps the state of the task's Adam in 8 bits. None leaves the optimizer as the task builds it."""
    batch_norm: str = "exact"
    """``exact`` normalizes BatchNorm over the samples of all ranks; ``local`` uses the samples of each rank alone;
    ``grain`` those of each grain."""
    fuses: bool = True
    """True if the task's Adam uses a fused kernel, unless the task has chosen an implementation itself."""
    lean: bool = False
    """True if gradients and memory are not watched."""
    cuda_graphs: str = "off"
    """``auto`` replays forward and backward of batches of known shapes as CUDA graphs, where that is possible."""
    update_in_backward: bool = False
    """True if each parameter is updated during backward, as soon as its gradient is complete."""
    clip_norm: float | None = None
    """Maximum norm of the gradients of one step, over all ranks. None disables clipping."""
    all_reduce: str | None = None
    """Name of the all-reduce that sums the gradients. None chooses the fastest one known for these ranks."""
    compression: str | None = None
    """Name of a gradient compression. None means no compression."""
    bucket_bytes: int | None = None
    """Bucket size in bytes for gradient synchronization. None lets the synchronizer choose it."""
    throttle: Throttle | None = None
    """Emulates slower devices, per rank. None means no emulation."""
    batch_size: int | None = None
    """The number of samples in a batch, over all ranks. None means the task's."""
    micro_batch: int | None = None
    """The number of samples in a micro-batch, over all ranks. None means whole batches."""
    weights: Sequence[float] | None = None
    """The ranks' shares, if the user has fixed them. A strategy that divides the model may use them to divide it."""
    devices: tuple[str, ...] | None = None
    """The devices of this process, for a strategy that uses several devices in one process. None means all available
    ones."""

    @property
    def bucket_nbytes(self) -> int:
        """Bucket size in bytes for what is sent after backward: as set, or PyTorch's default."""
        return self.bucket_bytes or DEFAULT_BUCKET_NBYTES

    @property
    def weight_type(self) -> torch.dtype | None:
        """Data type of the weights. None keeps the types of the model."""
        return self.dtype or self.precision.weights


_NOT_MEASURED: Readout = ReadyValue(0.0)


@dataclass(slots=True)
class StepOutcome:
    """The result of one rank's forward and backward passes in a step, before the update. On a GPU, its numbers are read
    without waiting for the device."""

    totals: tuple[Readout, ...]
    """The summed loss over this rank's samples, one for each micro-batch."""
    missing: tuple[str, ...]
    """Names of the parameters that got no gradient from this rank's samples."""
    buffers_changed: bool
    """True if the forward pass wrote to buffers that the strategy does not keep equal across ranks."""
    compute_seconds: Readout
    """Seconds of this rank's own work, without the time it waited for other ranks."""
    soundness: tuple[Readout, ...] = ()
    """Numbers of which at least one is not finite if a gradient of this rank's own samples is not finite."""
    unsound: tuple[Readout, ...] = ()
    """The position of a parameter with a non-finite gradient, counted from 1 in the list of all parameter names; 0 for
    none. The largest number counts."""

    memory: MemoryUse = NOTHING
    """Memory use of the rank's device since the passes of the previous step."""
    retries: int = 0
    """How often the passes were repeated in smaller pieces because memory ran out."""
    piece: int = 0
    """The largest number of samples in one pass that fits into memory; 0 if unknown or if everything fits."""

    terms: float | None = None
    """The number of terms over all ranks, if the stepper has counted them; else the row of the step before has it."""

    merge_spread: tuple[float, ...] = ()
    merge_ranks: tuple[tuple[int, ...], ...] = ()
    merge_bytes: int = 0
    """See :class:`~evener.core.records.StepRecord`."""
    input_seconds: float = 0.0
    """Seconds in which the stepper waited for samples."""
    merges: tuple[tuple[Any, ...], ...] = ()
    """The merges of a section of asynchronous training."""
    wasted: int = 0
    """The number of samples whose gradients were computed and did not merge."""
    batch: Batch | None = None
    """What was computed of the batch, if that was not known before the step: its size, and the samples of each rank."""
    asked_to_stop: int = 0
    """The number of the signal for which the step was ended early, on all ranks; 0 for none."""

    changes: tuple[str, ...] = ()
    """How the set of trained parameters differs from the set at the start: one text for each parameter."""
    has_changed: bool = False
    """True if ``changes`` changed in this step."""
    forward_seconds: Readout = _NOT_MEASURED
    """Seconds of forward passes, a part of ``compute_seconds``; 0 if not measured."""

    @property
    def missing_code(self) -> float:
        """A checksum of the missing names: 0 if none are missing. Equal sets of names give equal numbers."""
        return float(1 + zlib.crc32("\n".join(self.missing).encode())) if self.missing else 0.0


class Stepper(ABC):
    """Runs this rank's part of every step.

    On a GPU the stepper only queues work and never waits for the device. It returns numbers as ``Readout`` objects.
    """

    outer: torch.optim.Optimizer | None = None
    """The optimizer of merged differences, if replicas take steps of their own between two merges."""
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    """The task's scheduler if it goes by steps. A stepper that updates the weights itself steps it, too."""
    updates: bool = False
    """True if the stepper updates the weights itself, so that no update follows."""
    interrupted: Any = None
    """What is done of a step that an error has ended, if the state of this rank is that after it. A stepper with
    another engine goes on from there if it gets this as :attr:`before`."""
    before: Any = None
    """What is done of the next step already."""
    outlives_ranks: bool = False
    """True if this rank can go on with a step after another rank has died, until that is replaced."""

    @abstractmethod
    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        """Runs forward and backward on the rank's share. When it returns, the gradients have been synchronized.

        Args:
            divisor: Returns the global divisor of the loss, with the loss scale in it. It is called after the first
                forward pass, so that the message that brings the divisor can travel during that pass.
        """

    def elapsed(self, whole: Readout) -> Readout:
        """Returns the seconds of this rank's part of the last step without those in which it waited for samples.

        Args:
            whole: The seconds from the first pass to the end of the last one.
        """
        return whole

    @abstractmethod
    def outputs(self, micro: MicroBatch) -> Tree:
        """Returns the model's outputs in evaluation. They are valid only on the rank that reports the outputs of this
        part of the batch; other ranks may return anything."""


class MemoryWatch(Protocol):
    """Measures the memory use of a rank."""

    def begin(self, batch: Batch) -> None:
        """Called before the passes of a step."""

    def part(self) -> Lap:
        """Called between two passes. Returns the memory in use now and the peak since the last reading."""

    def end(self, batch: Batch) -> MemoryUse:
        """Called after the passes of a step, when the gradients exist. Returns the memory use of the step."""

    def relieve(self, asked: int) -> None:
        """Called after an allocation failed in the passes and their tensors were freed.

        Args:
            asked: Size of the failed allocation in bytes; 0 if unknown.
        """


class StoredReplicas(Protocol):
    """The replicas of a rank, for a strategy in which replicas take steps of their own between two merges."""

    words: str
    """A description of the merge, for the record of the run."""

    def held(self, held: HeldState) -> HeldState:
        """Adds what the replicas of this rank have beside the model and its optimizer's state."""

    def gathered(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Adds what the replicas of other ranks have to a whole state. All ranks must call this together."""

    def load(self, state: Mapping[str, Mapping[str, Any]], cut: Cut | None) -> None:
        """Takes over the state of the replicas, and of the outer optimizer, from an optimizer's saved state.

        Args:
            cut: Cuts this rank's part out of a whole saved tensor. None if ``state`` holds parts.
        """


class ModelCall(NamedTuple):
    """The arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BatchSlicer:
    """Selects the samples, or pieces of samples, that this rank computes. This base class selects everything: it is for
    strategies that do not divide samples."""

    @property
    def divides(self) -> bool:
        """True if a rank computes pieces of samples."""
        return type(self) is not BatchSlicer

    def trained(self, micro: MicroBatch) -> MicroBatch:
        """Returns this rank's piece of the inputs and targets."""
        return micro

    def evaluated(self, micro: MicroBatch) -> MicroBatch:
        """Returns this rank's piece of the inputs, with the whole targets."""
        return micro

    def of_loop(self, batch: Any, micro: MicroBatch) -> MicroBatch:
        """Returns this rank's piece of ``batch``, of which a loop of the user's own knows what is what, as inputs."""
        return dataclasses.replace(micro, inputs=batch)

    def try_call(self, call: ModelCall, micro: MicroBatch) -> None:
        """Called with the first call of the model in such a loop. All ranks must call this together.

        Raises:
            TaskError: If the model does not compute from pieces what it computes from whole samples.
        """

    def whole(self, outputs: Tree, piece: MicroBatch) -> Tree:
        """Returns the outputs for whole samples, joined from the pieces of all ranks. Valid on the rank that reports
        the outputs."""
        return outputs
