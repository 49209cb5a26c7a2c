"""A stand-in for the module ``pynvml``: its functions and errors, over cards that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As of the module, whose every failure it is."""


@dataclass
class FakeCard:
    name: Any = "NVIDIA GeForce RTX 3090"
    uuid: str = "GPU-0"
    bus: Any = "00000000:01:00.0"
    capability: tuple[int, int] = (8, 6)
    total: int = 24 << 30
    free: int = 20 << 30
    width: int = 16
    reasons: int = 1
    mode: int = 0
    mig: bool = False
    errors: int = 0
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    watts: tuple[int, int] = (350, 350)
    processes: list[tuple[int, int | None]] = field(default_factory=list)


class FakeNvml:
    """Asked as the module is; ``unsupported`` names functions that this driver refuses, ``without`` what it lacks."""

    NVMLError = NVMLError

    def __init__(
        self,
        cards: list[FakeCard],
        unsupported: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        broken: str = "",
    ) -> None:
        self.cards, self.broken = cards, broken
        self._unsupported, self._without = unsupported, without
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        """A function or a constant of the module."""
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name not in ANSWERS or name in self._without:
            raise AttributeError(name)

        def ask(*arguments: Any) -> Any:
            assert self.open or name == "nvmlInit", f"{name} before nvmlInit or after nvmlShutdown"
            if name in self._unsupported:
                raise NVMLError("Not Supported")
            return ANSWERS[name](self, *arguments)

        return ask


def _start(fake: FakeNvml) -> None:
    if fake.broken:
        raise NVMLError(fake.broken)
    fake.open += 1


def _stop(fake: FakeNvml) -> None:
    fake.open -= 1


def _processes(fake: FakeNvml, card: FakeCard) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in card.processes]


CONSTANTS = {
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_COMPUTEMODE_EXCLUSIVE_THREAD": 1,
    "NVML_COMPUTEMODE_PROHIBITED": 2,
    "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": 3,
    "nvmlClocksThrottleReasonHwSlowdown": 0x08,
    "nvmlClocksThrottleReasonSwThermalSlowdown": 0x20,
    "nvmlClocksThrottleReasonHwThermalSlowdown": 0x40,
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": 0x80,
}
"""Numbers of nvml.h, under the names of the module."""
ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": _start,
    "nvmlShutdown": _stop,
    "nvmlDeviceGetCount": lambda fake: len(fake.cards),
    "nvmlDeviceGetHandleByIndex": lambda fake, n: fake.cards[n],
    "nvmlSystemGetDriverVersion": lambda fake: b"570.124.06",
    "nvmlSystemGetCudaDriverVersion_v2": lambda fake: 12080,
    "nvmlDeviceGetName": lambda fake, card: card.name,
    "nvmlDeviceGetUUID": lambda fake, card: card.uuid,
    "nvmlDeviceGetMemoryInfo": lambda fake, card: SimpleNamespace(total=card.total, free=card.free),
    "nvmlDeviceGetPciInfo": lambda fake, card: SimpleNamespace(busId=card.bus),
    "nvmlDeviceGetCudaComputeCapability": lambda fake, card: card.capability,
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda fake, card: 4,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda fake, card: card.width,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda fake, card: 16,
    "nvmlDeviceGetTemperature": lambda fake, card, sensor: 61,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda fake, card: card.reasons,
    "nvmlDeviceGetPowerManagementLimit": lambda fake, card: card.watts[0] * 1000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda fake, card: card.watts[1] * 1000,
    "nvmlDeviceGetComputeMode": lambda fake, card: card.mode,
    "nvmlDeviceGetMigMode": lambda fake, card: [int(card.mig), 0],
    "nvmlDeviceGetTotalEccErrors": lambda fake, card, kind, counter: card.errors,
    "nvmlDeviceGetRemappedRows": lambda fake, card: card.remapped,
    "nvmlDeviceGetComputeRunningProcesses": _processes,
}
"""By the functions' own names."""
