"""The parts of a strategy: what the user may set, who runs which micro-batch when, what is summed over the ranks."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evener.balance.throttle import Throttle
from evener.components.amp.policy import Precision
from evener.components.compile import Compiling
from evener.components.memory_limits.limits import MemoryLimits
from evener.core.config.offload import Offload
from evener.core.config.recompute import Recompute
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.hardware.async_read import Readout
from evener.hardware.memory.step_usage import NOTHING, Lap, MemoryUse


@dataclass(frozen=True)
class Settings:
    """What the user may set about any strategy."""

    seed: int = 0
    dtype: torch.dtype | None = None
    """Type of the weights and of floating inputs and targets; None leaves them as they are made."""
    precision: Precision = field(default_factory=Precision)
    """What the model computes in."""
    compiling: Compiling = field(default_factory=Compiling)
    """What torch.compile makes faster."""
    fits: bool = False
    """Whether micro-batches are cut as memory wants."""
    limits: MemoryLimits | None = None
    """What the ranks may use of their memory; None for all of it."""
    recompute: Recompute | None = None
    """Which blocks of the model are computed again in backward; None for none."""
    offload: Offload = field(default_factory=Offload)
    """What is kept outside of the device's memory."""
    optimizer_state: str | None = None
    """``8bit`` for the task's Adam with state in codes; None leaves the optimizer as it is made."""
    batch_norm: str = "exact"
    """``exact`` or ``local``: whether BatchNorm normalizes by the samples of all ranks, or by the rank's own."""
    fuses: bool = True
    """Whether the task's Adam is updated by a fused kernel, where it says nothing else."""
    update_in_backward: bool = False
    """Whether parameters are updated while backward runs."""
    clip_norm: float | None = None
    """Largest global norm of the gradients of one step."""
    all_reduce: str | None = None
    """Name of the all-reduce that sums gradients; None for the best that the ranks are known to have."""
    compression: str | None = None
    """Name of a compression of gradients; None for none."""
    bucket_bytes: int | None = None
    """Size of the buckets in which gradients are exchanged while backward runs; None to have it chosen."""
    throttle: Throttle | None = None
    """Emulation of unequal devices, by rank; None for none."""
    weights: Sequence[float] | None = None
    """Parts of the ranks, where the user fixed them: a strategy that divides the model divides it so."""
    devices: tuple[str, ...] | None = None
    """Devices of this process, for a strategy that uses several in one; None for those that there are."""

    @property
    def weight_type(self) -> torch.dtype | None:
        """Type of the weights; None leaves them as they are made."""
        return self.dtype or self.precision.weights


@dataclass(slots=True)
class StepOutcome:
    """What one rank knows after its part of a step, before the update. Numbers of a device are still on their way."""

    totals: tuple[Readout, ...]
    """Sums of the loss's terms over this rank's samples, one for each micro-batch."""
    missing: tuple[str, ...]
    """Names of the parameters to which no sample of this rank gave a gradient."""
    buffers_changed: bool
    """Whether the forward pass wrote to buffers that the strategy does not keep equal by itself."""
    compute_seconds: Readout
    """Time of this rank's own work, waiting for others left out."""
    soundness: tuple[Readout, ...] = ()
    """Numbers of which one is not finite if a gradient of this rank's own samples is not."""
    unsound: tuple[Readout, ...] = ()
    """Then the place of that parameter among the names of all, from 1 on, if it is known; the largest is meant."""

    memory: MemoryUse = NOTHING
    """Of the rank's device, since the passes of the step before."""
    retries: int = 0
    """How often the passes were taken again in smaller pieces, for want of memory."""
    piece: int = 0
    """The most samples of a pass that there is room for; 0 if none is known."""

    changes: tuple[str, ...] = ()
    """How the set of trained parameters differs from that at the beginning, by name."""
    has_changed: bool = False
    """Whether that is new with this step."""

    @property
    def missing_code(self) -> float:
        """0 where nothing is missing, else a number that is equal only for equal sets of names."""
        return float(1 + zlib.crc32("\n".join(self.missing).encode())) if self.missing else 0.0


class Stepper(ABC):
    """Runs this rank's part of every step.

    On a GPU it only queues work, and waits for none: what it learns of a number it hands on as a ``Readout``.
    """

    @abstractmethod
    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        """Forward and backward of the rank's share; when it returns, gradients are exchanged too.

        ``divisor`` is asked for after the first forward pass, so that the message that brings it travels meanwhile.
        """

    @abstractmethod
    def outputs(self, micro: MicroBatch) -> Tree:
        """The model's outputs in evaluation, on the rank that speaks for the part; anything on others."""


class Watch(Protocol):
    """Follows the memory of a rank."""

    def begin(self, batch: Batch) -> None:
        """The passes of a step begin."""

    def part(self) -> Lap:
        """Between two passes: what there is, and was since it was asked last."""

    def end(self, batch: Batch) -> MemoryUse:
        """They are over, and gradients are there."""

    def relieve(self, asked: int) -> None:
        """An allocation of so many bytes, 0 if that is not known, failed in the passes, and what they made has gone."""


class Cut:
    """What of a part's samples this rank computes: all of it, here and where samples are not divided."""

    def trained(self, micro: MicroBatch) -> MicroBatch:
        """This rank's piece of inputs and targets."""
        return micro

    def evaluated(self, micro: MicroBatch) -> MicroBatch:
        """This rank's piece of the inputs, beside whole targets."""
        return micro

    def whole(self, outputs: Tree, piece: MicroBatch) -> Tree:
        """From the outputs for the pieces of all ranks, those for the whole samples, on the rank that speaks."""
        return outputs


class Synchronizer:
    """Sums nothing: that of one rank alone, and what those for several derive from."""

    words = "none: one rank"
    """What sums gradients, for the record."""
    keeps_equal: bool = True
    """Whether ranks that hold the same weights and buffers have the same bits after every step."""

    exchanges_in_passes: bool = True
    """Whether ranks may wait for each other before all passes of a step are over."""

    bucket_nbytes: int = 0
    """Bytes that it takes at most, besides parameters and gradients, for what is sent or received."""

    holds_all: bool = False
    """Whether each rank holds all that the training goes on from, so that one that stays can give it to a new one.
    It then tells the learner before it gives its last gradients (`Learner.has_drawn`)."""

    follows: bool = False
    """Whether parameters may be frozen and thawed between steps (`Trained`)."""

    def alone(self) -> None:
        """From here on nobody but updates writes to weights, as in a whole run. A collective call."""

    def wrap(self, replica: nn.Module) -> nn.Module:
        """What is called in place of ``replica``, which goes from a micro-batch to the total of its terms."""
        return replica

    def forward(self) -> AbstractContextManager[Any]:
        """Around a forward pass that is not followed by backward."""
        return nullcontext()

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; gradients are exchanged with the ``last`` one."""
        return nullcontext()

    def until_complete(self) -> AbstractContextManager[Any]:
        """Around all forward and backward passes of a step, in any order, in place of :meth:`micro_batch`: gradients
        are exchanged in :meth:`complete`, when the last of them is over."""
        return nullcontext()

    def complete(self) -> tuple[str, ...]:
        """Ends the rank's own work and the exchange of gradients; names the parameters that it gave none."""
        return ()

    def completes_in_backward(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of ``parameter`` is summed over the ranks, and in no bucket with others, when backward
        calls the hooks on it."""
        return False

    def gave(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has added to the gradient of one that is complete, asked in backward."""
        return True

    def soundness(self) -> tuple[Readout, ...]:
        """See :class:`StepOutcome`."""
        return ()

    def sum_thawed(self, without: Collection[str]) -> None:
        """Before an update, sums the gradients of thawed parameters, ``without`` those that no rank gave one."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums gradients that a loop of the user's own left in ``parameters``, over the ranks."""

    def share_buffers(self, buffers: Sequence[Tensor], part: int) -> None:
        """Gives all ranks the buffers of those that compute part number ``part`` of the batch."""

    def updated(self, step: int) -> None:
        """The optimizer has taken the step: what is exchanged every few steps, and not in each, is exchanged here."""

    def let_go(self) -> None:
        """Forgets what the learner calls in place of its model, which others keep, and which may refer to this."""

    def close(self) -> None:
        """Gives back what the synchronizer owns."""
