"""Reads numbers from a device without waiting for work that was queued after them.

``float(tensor)`` on a GPU waits for all work queued before the call. A readout starts an asynchronous copy when the
number is computed, and is read later: it then waits for the number only, while later work continues::

    loss = read(total)         # queued behind the forward pass
    total.backward()           # queued
    loss.value()               # waits for the forward pass only

``READERS`` has a reader for each device type. A fake device, which has no numbers, can register its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from evener.hardware.accelerators import WITH_STREAMS


class Readout(Protocol):
    """Numbers that may still be being computed or copied."""

    @property
    def tensor(self) -> Tensor:
        """The numbers on the device that computed them."""

    def value(self) -> float:
        """Returns the only number. Waits until it has been computed."""

    def values(self) -> list[float]:
        """Returns all numbers as a flat list. Waits until they have been computed."""


class ReadyValue:
    """A readout whose numbers are read when they are asked for. Does not wait for numbers on the host."""

    def __init__(self, numbers: float | Tensor) -> None:
        self._numbers = numbers

    @property
    def tensor(self) -> Tensor:
        return _tensor(self._numbers)

    @property
    def is_of_host(self) -> bool:
        """True for a number that is no tensor."""
        return not isinstance(self._numbers, Tensor)

    def value(self) -> float:
        return float(self._numbers)

    def values(self) -> list[float]:
        return [float(number) for number in self.tensor.flatten().tolist()]


class AsyncCopyValue:
    """A readout that copies numbers from a device to pinned memory asynchronously."""

    def __init__(self, numbers: Tensor) -> None:
        self.tensor = numbers
        self._values: list[float] | None = None
        self._copy = _pinned_like(numbers)
        self._copy.copy_(numbers, non_blocking=True)
        self._copied = torch.accelerator.current_stream(numbers.device).record_event()

    def value(self) -> float:
        (number,) = self.values()
        return number

    def values(self) -> list[float]:
        if self._values is None:
            self._copied.synchronize()
            self._values = [float(each) for each in self._copy.flatten().tolist()]
        return list(self._values)

    def __del__(self) -> None:
        if self._values is not None:  # otherwise the device may still write there
            _free_pinned(self._copy)


_PINNED: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
_MOST_PINNED = 8
"""Free pieces of pinned memory of one kind that are kept."""


def _pinned_like(numbers: Tensor) -> Tensor:
    """Returns pinned memory for ``numbers``, if possible such as was used before: PyTorch's own cache of it takes 10 to
    30 us."""
    free = _PINNED.get((numbers.shape, numbers.dtype))
    try:
        return free.pop() if free else torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    except IndexError:  # another thread took the last one
        return torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)


def _free_pinned(memory: Tensor) -> None:
    """Gives pinned memory back that nothing writes to or reads any more."""
    free = _PINNED.setdefault((memory.shape, memory.dtype), [])
    if len(free) < _MOST_PINNED:
        free.append(memory)


class DeferredValue:
    """A readout that calls a function for its number when it is first asked for, and caches the result."""

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
    """Converts a Python number to a float64 tensor, since float32, PyTorch's default, keeps only 24 of its 53 bits."""
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.float64)


READERS: dict[str, Callable[[Tensor], Readout]] = {
    "cpu": ReadyValue,
    **dict.fromkeys(WITH_STREAMS, AsyncCopyValue),
}
"""Readout class by device type. Other types use `ReadyValue`."""


def read(numbers: float | Tensor) -> Readout:
    """Starts reading a number or a tensor of numbers."""
    if not isinstance(numbers, Tensor):
        return ReadyValue(numbers)
    return READERS.get(numbers.device.type, ReadyValue)(numbers.detach())


def kept(number: Tensor) -> Readout:
    """Returns a readout for a number that is used on its device and rarely read. Starts no copy, so that reading it
    waits for all queued work.

    Starting a copy needs memory and an event, about 60 us of host time per step on one GPU.
    """
    return ReadyValue(number.detach())


def is_late(device: torch.device) -> bool:
    """Returns True if the device works asynchronously, so that the results of a step are known after its end."""
    return device.type != "cpu"
