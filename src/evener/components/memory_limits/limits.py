"""Limits the memory that each rank may use, to emulate smaller devices, also on a CPU. Limits may change in mid-run.

On a GPU, PyTorch's allocator enforces the limit. On a CPU nothing does, so that the tensors of each operator are
counted (:class:`evener.hardware.memory.MemoryTracker`), which takes a few per cent of the time. Memory that PyTorch
allocates for other things than tensors is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from evener.core.config.sizes import parse_limits, parse_size, size_words
from evener.errors import ConfigurationError
from evener.hardware import accelerators
from evener.hardware.cgroups import memory_limit
from evener.hardware.memory import MemoryTracker
from evener.hardware.memory_size import free_nbytes


class LimitChange(NamedTuple):
    """A change of a limit: from ``step`` on, ``rank`` may use ``nbytes``."""

    step: int
    rank: int
    nbytes: int


@dataclass(frozen=True)
class MemoryLimits:
    """The memory limits of all ranks."""

    nbytes: tuple[int | None, ...]
    """The first limit of each rank in bytes. None means no limit."""
    changes: tuple[LimitChange, ...] = ()

    @classmethod
    def parse(cls, text: str | None, changes: Sequence[str], ranks: int) -> MemoryLimits | None:
        """Parses ``24GB`` or ``24GB,12GB,-``, and changes of the form ``STEP:RANK:SIZE``. Returns None if both are
        missing.

        Raises:
            ConfigurationError: If a size is malformed, or a rank does not exist.
        """
        if text is None and not changes:
            return None
        parsed = tuple(_parse_change(change, ranks) for change in changes)
        return cls(tuple(parse_limits(text, ranks)), tuple(sorted(parsed, key=lambda change: change.step)))

    def limit_for(self, rank: int, step: int) -> int | None:
        """Returns the limit of ``rank`` in ``step`` in bytes. Returns None if there is none."""
        own = [change.nbytes for change in self.changes if change.rank == rank and change.step <= step]
        return own[-1] if own else self.nbytes[rank]

    def can_bind(self, rank: int) -> bool:
        """Returns True if ``rank`` has a limit in any step."""
        return self.nbytes[rank] is not None or any(change.rank == rank for change in self.changes)

    @property
    def description(self) -> str:
        """A text about the limits, for the user."""
        limits = ", ".join("-" if each is None else size_words(each) for each in self.nbytes)
        changes = "".join(
            f"; rank {r} {size_words(nbytes)} from step {step}" for step, r, nbytes in self.changes
        )
        return f"memory of the ranks is limited to {limits}{changes}"


def _parse_change(text: str, ranks: int) -> LimitChange:
    step, _, rest = text.partition(":")
    rank, colon, size = rest.partition(":")
    if not colon or not step.isdecimal() or not rank.isdecimal():
        raise ConfigurationError(f"memory_limit_at {text!r} is not STEP:RANK:SIZE, such as 100:1:2GiB")
    if int(rank) >= ranks:
        raise ConfigurationError(f"memory_limit_at {text!r}: there are {ranks} ranks, from 0")
    return LimitChange(int(step), int(rank), parse_size(size))


class Room(Protocol):
    """The memory of a rank's device."""

    def allow(self, nbytes: int | None) -> None:
        """Called at the start of a step. Sets the limit in bytes; None means no limit."""

    def over(self) -> None:
        """Called at the end of a step. On a CPU, loading samples and copying state are not limited."""

    def left(self) -> float:
        """Returns how many more bytes may be allocated; infinite if unknown."""


class _Unlimited:
    """The memory of a device without limit."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks, self._container = device, ranks, memory_limit()

    def allow(self, nbytes: int | None) -> None:
        pass

    def over(self) -> None:
        pass

    def left(self) -> float:
        return free_nbytes(self._device, self._ranks, self._container)


class _Counted(_Unlimited):
    """The limited memory of a CPU, counted by a memory tracker."""

    def __init__(self, device: torch.device, ranks: int, account: MemoryTracker) -> None:
        super().__init__(device, ranks)
        self._account = account

    def allow(self, nbytes: int | None) -> None:
        self._account.limit = nbytes

    def over(self) -> None:
        self._account.limit = None

    def left(self) -> float:
        limit = self._account.limit
        return super().left() if limit is None else max(0, limit - self._account.held)


class _OfCard:
    """The limited memory of a GPU. PyTorch's allocator enforces the limit.

    Raises:
        ConfigurationError: If the allocator for this kind of device enforces no limits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._part = device, 1.0
        own = accelerators.memory_of(device)
        hold = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
        if own is None or hold is None or device.type not in accelerators.WITH_STREAMS:
            raise ConfigurationError(
                f"memory_limit: PyTorch holds nobody to a part of a device of kind {device.type!r}; leave it out"
            )
        self._total, self._hold = own[1], hold

    def allow(self, nbytes: int | None) -> None:
        part = 1.0 if nbytes is None else min(1.0, nbytes / self._total)
        if part != self._part:
            self._hold(part, self._device)
            self._part = part

    def over(self) -> None:
        pass

    def left(self) -> float:
        of_part = self._part * self._total - torch.accelerator.memory_allocated(self._device)
        return max(0.0, min(of_part, free_nbytes(self._device, 1, None)))


@contextmanager
def room_on(device: torch.device, limited: bool, ranks: int) -> Iterator[tuple[Room, MemoryTracker | None]]:
    """Yields the memory of ``device``, and, on a CPU with limits, the tracker that counts it (else None). Removes the
    limit at the end.

    Args:
        limited: True if the rank has a limit in any step.
        ranks: The number of ranks that share the host's memory.
    """
    if not limited:
        yield _Unlimited(device, ranks), None
    elif accelerators.is_accelerator(device):
        card = _OfCard(device)
        try:
            yield card, None
        finally:
            card.allow(None)
    else:
        with MemoryTracker() as account:
            yield _Counted(device, ranks, account), account
