"""Reading a number off a device without waiting for the work that was queued after it.

``float(tensor)`` on a GPU waits for all that was queued before it. A readout is started where the number is computed
and read where it is needed: it then waits for the number alone, while what was queued in between goes on::

    loss = read(total)         # queued behind the forward pass
    total.backward()           # queued
    loss.value()               # waits for the forward pass only

How a kind of device is read stands in ``READERS``: a stand-in for a GPU, which has no numbers at all, brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from evener.hardware.accelerators import WITH_STREAMS


class Readout(Protocol):
    """Numbers on their way."""

    @property
    def tensor(self) -> Tensor:
        """The numbers where they were computed."""

    def value(self) -> float:
        """The number, if it is one; waits until it has been computed."""

    def values(self) -> list[float]:
        """All of them, flat; waits until they have been computed."""


class Here:
    """Numbers of the host."""

    def __init__(self, numbers: float | Tensor) -> None:
        self._numbers = numbers

    @property
    def tensor(self) -> Tensor:
        return _tensor(self._numbers)

    def value(self) -> float:
        return float(self._numbers)

    def values(self) -> list[float]:
        return [float(number) for number in self.tensor.flatten().tolist()]


class OnTheWay:
    """Numbers that are copied from a device to pinned memory."""

    def __init__(self, numbers: Tensor) -> None:
        self.tensor = numbers
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._copied = torch.accelerator.current_stream(numbers.device).record_event()

    def value(self) -> float:
        self._copied.synchronize()
        return float(self._copy)

    def values(self) -> list[float]:
        self._copied.synchronize()
        return [float(number) for number in self._copy.flatten().tolist()]


class Later:
    """A number of the host that is worked out when it is asked for, once."""

    def __init__(self, number: Callable[[], float]) -> None:
        self._number = number
        self._found: float | None = None

    @property
    def tensor(self) -> Tensor:
        return _tensor(self.value())

    def value(self) -> float:
        if self._found is None:
            self._found = self._number()
        return self._found

    def values(self) -> list[float]:
        return [self.value()]


def _tensor(numbers: float | Tensor) -> Tensor:
    """Python's numbers have 53 bits, of which PyTorch's default type keeps 24."""
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.float64)


READERS: dict[str, Callable[[Tensor], Readout]] = {"cpu": Here, **dict.fromkeys(WITH_STREAMS, OnTheWay)}
"""By type of device; of any other a number is read when it is asked for."""


def read(numbers: float | Tensor) -> Readout:
    """Starts to read a number or a tensor of numbers."""
    if not isinstance(numbers, Tensor):
        return Here(numbers)
    return READERS.get(numbers.device.type, Here)(numbers.detach())


def kept(number: Tensor) -> Readout:
    """A number that goes on on its device and is hardly read: whoever asks for its value waits for all that was queued.

    To start reading costs memory, a copy and an event, some 60 us of the host's time a step on one card.
    """
    return Here(number.detach())


def is_late(device: torch.device) -> bool:
    """Whether the host runs ahead of the device, so that the results of a step come after its end."""
    return device.type != "cpu"
