"""How much memory each rank may use, which may change in mid-run: a rehearsal of smaller devices, also on a CPU.

On a GPU PyTorch's allocator holds a process to its part of the card. On a CPU nothing does, so that there each operator
is counted (:class:`evener.hardware.memory.Accounting`), which takes a few per cent of its time; what PyTorch
allocates besides tensors is not.
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
from evener.hardware.memory import Accounting
from evener.hardware.memory_size import free_nbytes


class LimitChange(NamedTuple):
    """From ``step`` on, ``rank`` may use ``nbytes``."""

    step: int
    rank: int
    nbytes: int


@dataclass(frozen=True)
class MemoryLimits:
    """What the ranks may use."""

    nbytes: tuple[int | None, ...]
    """By rank; None for all that there is."""
    changes: tuple[LimitChange, ...] = ()

    @classmethod
    def parse(cls, text: str | None, changes: Sequence[str], ranks: int) -> MemoryLimits | None:
        """From ``24GB`` or ``24GB,12GB,-`` and changes, each ``STEP:RANK:SIZE``; None for no limit at all.

        Raises:
            ConfigurationError: If one is no size, or of a rank or step that there is not.
        """
        if text is None and not changes:
            return None
        parsed = tuple(_parse_change(change, ranks) for change in changes)
        return cls(tuple(parse_limits(text, ranks)), tuple(sorted(parsed, key=lambda change: change.step)))

    def of(self, rank: int, step: int) -> int | None:
        """What ``rank`` may use in ``step``."""
        own = [change.nbytes for change in self.changes if change.rank == rank and change.step <= step]
        return own[-1] if own else self.nbytes[rank]

    def can_bind(self, rank: int) -> bool:
        """Whether there is a limit for ``rank`` at any time."""
        return self.nbytes[rank] is not None or any(change.rank == rank for change in self.changes)

    @property
    def words(self) -> str:
        """What the user must know of such a run."""
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
        """A step begins, in which so much may be used; None for all that there is."""

    def over(self) -> None:
        """The step is over: what loads samples or copies state may use a host's memory."""

    def left(self) -> float:
        """Bytes that may be taken besides what is held now; infinite if that is not known."""


class _Unlimited:
    """All that a device has."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks, self._container = device, ranks, memory_limit()

    def allow(self, nbytes: int | None) -> None:
        pass

    def over(self) -> None:
        pass

    def left(self) -> float:
        return free_nbytes(self._device, self._ranks, self._container)


class _Counted(_Unlimited):
    """A CPU's."""

    def __init__(self, device: torch.device, ranks: int, account: Accounting) -> None:
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
    """A GPU's, as PyTorch's allocator sees it.

    Raises:
        ConfigurationError: If that of its kind holds nobody to a limit.
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
def room_on(device: torch.device, limited: bool, ranks: int) -> Iterator[tuple[Room, Accounting | None]]:
    """The memory of ``device``, and on a CPU with limits what counts it; all of it may be used again afterwards.

    Args:
        ranks: So many share the host's memory.
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
        with Accounting() as account:
            yield _Counted(device, ranks, account), account
