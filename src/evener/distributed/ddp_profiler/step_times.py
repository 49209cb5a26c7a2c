"""What is known of a step of a script on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class StepTimes:
    """Times and counts of one step on one rank, or their mean over steps."""

    seconds: float = 0.0
    forward_seconds: float = 0.0
    """The rank's own work outside of the other parts."""
    backward_seconds: float = 0.0
    exchange_seconds: float = 0.0
    """Synchronization with other ranks that was not hidden by backward, and waiting for them."""
    input_seconds: float = 0.0
    """Time spent waiting for the DataLoader."""
    update_seconds: float = 0.0
    """Time in optimizers."""
    saving_seconds: float = 0.0
    """Time in ``torch.save``, also before the step: a save after an evaluation."""
    between_seconds: float = 0.0
    """Time before the step that is no part of it, such as that of an evaluation, without saves."""
    samples: float = 0.0
    """Size of the first dimension of the first tensor given to a DDP module with gradients, over all its calls. Without
    such a module, that of the DataLoader's batches."""
    collectives: float = 0.0
    nbytes: float = 0.0
    """Bytes that the rank gave to collectives."""

    @property
    def compute_seconds(self) -> float:
        """The rank's own work: forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def rest_seconds(self) -> float:
        """The rest of the step: synchronization, waiting for others, and the update."""
        return max(0.0, self.seconds - self.compute_seconds - self.input_seconds)


class ObservedStep(NamedTuple):
    """One step on one rank."""

    numbers: Sequence[float]
    """The fields of its `StepTimes`, in their order."""
    loss: float
    """What ``backward`` was called on, without the factor of a GradScaler. NaN if it was called more than once."""
    lr: float
    """Learning rate of the optimizer's first group. NaN if it is a tensor."""
    ended: float
    """Unix time of its end."""

    @property
    def times(self) -> StepTimes:
        """The numbers by name."""
        return StepTimes(*self.numbers)
