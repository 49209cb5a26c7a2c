"""Whether gradients are finite, on a device that runs behind the host: asked in one call, and read with the losses.

The device computes the largest element of each gradient. What is made of these numbers depends on who reads them. A
rank alone copies them to the host with the loss and looks there, a step later; of many it copies only whether one is
not finite, and reads them if that is so, because bringing many scalars together takes the host longer than computing
them. Ranks that tell each other reduce them first, on the device, to one number and the place of a gradient that is
not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from evener.hardware.async_read import read
from evener.torch_internals.foreach import are_finite

_FEW = 32
"""Number of norms up to which all of them are brought to the host."""


class LateNorms:
    """The largest elements of gradients on one device. As a readout it is a number that is finite if all of them are.

    Args:
        norms: The largest absolute value of each gradient: a scalar for each, or all in one tensor.
        places: The positions of their parameters among all, counted from 1.
    """

    def __init__(self, norms: list[Tensor] | Tensor, places: Sequence[float]) -> None:
        self.norms, self.places = norms if isinstance(norms, list) else [norms], places

    @property
    def are_many(self) -> bool:
        """True if :attr:`are_sound` reaches the host sooner than all of them."""
        return len(self.norms) > _FEW and self.norms[0].dtype in (torch.float32, torch.float64)

    @cached_property
    def are_sound(self) -> Tensor:
        """A number that is 1 if all are finite, and 0 otherwise."""
        return are_finite(self.norms)

    @cached_property
    def stacked(self) -> Tensor:
        """All of them in one tensor."""
        return self.norms[0] if self.norms[0].dim() else torch.stack(self.norms)

    @cached_property
    def tensor(self) -> Tensor:
        """Their sum in float64."""
        return self.stacked.sum(dtype=torch.float64)

    def value(self) -> float:
        return read(self.tensor).value()

    def values(self) -> list[float]:
        return [self.value()]


class LatePlace:
    """The position of the last parameter whose gradient is not finite, 0 if all are: a readout.

    Args:
        places_on: Returns positions as a tensor on a device.
    """

    def __init__(
        self, norms: LateNorms, places_on: Callable[[torch.device, Sequence[float]], Tensor]
    ) -> None:
        self.norms, self._places_on = norms, places_on

    @property
    def places(self) -> Tensor:
        """The positions on the device, in the order of the norms, in float64."""
        return self._places_on(self.norms.norms[0].device, self.norms.places)

    @cached_property
    def tensor(self) -> Tensor:
        return (self.places * self.norms.stacked.isfinite().logical_not()).amax()

    def value(self) -> float:
        return read(self.tensor).value()

    def values(self) -> list[float]:
        return [self.value()]
