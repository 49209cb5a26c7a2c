"""Memory that other processes use on a GPU, read from NVIDIA's management library (NVML).

A query takes about 100 microseconds, too long for each step, and the answer seldom changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from evener.hardware.survey.facts import Tenant
from evener.hardware.survey.kernel import bare_uuid
from evener.hardware.survey.nvml import Questions, opened, tenants


class CardUse(NamedTuple):
    """Memory of a whole card in bytes, used by any process."""

    free: int
    total: int
    others: tuple[Tenant, ...]
    """Other processes that this one can see. In a container there may be none."""


class Neighbours:
    """Reads the memory use of the card with this ``uuid``."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._ask = ask = Questions(nvml)
        self._handle = next((each for each in ask.handles() if ask.uuid(each) == bare_uuid(uuid)), None)

    def read_usage(self) -> CardUse | None:
        """Returns the current memory use. Returns None if NVML does not report it."""
        memory = None if self._handle is None else self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        if memory is None:
            return None
        return CardUse(memory.free, memory.total, tenants(self._ask, self._handle))


@contextmanager
def neighbours_on(uuid: str, nvml: Any) -> Iterator[Neighbours | None]:
    """Opens NVML for the block, and yields a reader for a card.

    Yields None if NVML is not available, or if the device is not an NVIDIA card.

    Args:
        uuid: UUID of the card; empty if the device is not an NVIDIA card.
        nvml: The module ``pynvml`` or a replacement; None if it is not installed.
    """
    with ExitStack() as stack:
        found = None
        if uuid and nvml is not None:
            with suppress(nvml.NVMLError):
                stack.enter_context(opened(nvml))
                found = Neighbours(nvml, uuid)
        yield found


def uuid_of(device: torch.device) -> str:
    """Returns the UUID of an NVIDIA card; empty for any other device."""
    if device.type != "cuda" or torch.version.hip:
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
