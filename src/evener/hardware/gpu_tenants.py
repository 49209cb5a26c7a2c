"""What other processes have of a card, asked of NVIDIA's management library now and then.

A question takes some 100 microseconds, too long for each step, and the answer seldom changes.
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
    """Bytes of a whole card, whoever has them."""

    free: int
    total: int
    others: tuple[Tenant, ...]
    """Other processes, as far as this one may see them: in a container perhaps none."""


class Neighbours:
    """Asks for the card of that ``uuid``."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._ask = Questions(nvml)
        handles = (nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount()))
        named = ((bare_uuid(self._ask("nvmlDeviceGetUUID", handle) or ""), handle) for handle in handles)
        self._handle = next((handle for found, handle in named if found == bare_uuid(uuid)), None)

    def look(self) -> CardUse | None:
        """As it is now; None if the library does not say."""
        memory = None if self._handle is None else self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        if memory is None:
            return None
        return CardUse(memory.free, memory.total, tenants(self._ask, self._handle))


@contextmanager
def neighbours_on(uuid: str, nvml: Any) -> Iterator[Neighbours | None]:
    """Those on a card; None where there is nobody to ask, or it is no card of NVIDIA's.

    Args:
        uuid: Of the card; empty if it is none.
        nvml: The module ``pynvml``, or what stands in for it; None if it is not installed.
    """
    with ExitStack() as stack:
        found = None
        if uuid and nvml is not None:
            with suppress(nvml.NVMLError):
                stack.enter_context(opened(nvml))
                found = Neighbours(nvml, uuid)
        yield found


def uuid_of(device: torch.device) -> str:
    """Of a card of NVIDIA's; empty for any other device."""
    if device.type != "cuda" or torch.version.hip:
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
