"""Reads what torch does not know about NVIDIA cards, such as temperature and other processes, from NVIDIA's management
library (NVML).

The package ``nvidia-ml-py`` is optional (``pip install nvidia-ml-py``). Which queries work depends on the card, the
driver and the user's permissions; values without an answer are None or empty.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evener.hardware.survey.facts import Card, Tenant
from evener.hardware.survey.kernel import bare_uuid


@dataclass(frozen=True)
class Answers:
    """NVML's answers about a machine."""

    driver: str | None = None
    cuda: str | None = None
    cards: tuple[Card, ...] = ()
    refusal: str = ""
    """Error message if NVML could not be used; otherwise empty."""


def find_nvml() -> Any:
    """Imports the module of ``nvidia-ml-py``. Returns None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older package of the same name warns when it is imported
        try:
            return importlib.import_module("pynvml")
        except ImportError:
            return None


def ask_nvml(nvml: Any) -> Answers:
    """Reads everything that NVML reports about the driver and the cards.

    Args:
        nvml: The module ``pynvml``, or a replacement.
    """
    try:
        with opened(nvml):
            ask = Questions(nvml)
            number = ask("nvmlSystemGetCudaDriverVersion_v2")  # 12040 is 12.4
            return Answers(
                driver=ask("nvmlSystemGetDriverVersion"),
                cuda=f"{number // 1000}.{number % 1000 // 10}" if number else None,
                cards=tuple(_card(ask, handle) for handle in ask.handles()),
            )
    except nvml.NVMLError as error:
        return Answers(refusal=str(error))


def ask_brakes(nvml: Any) -> dict[str, tuple[str, ...]]:
    """Returns, by card UUID, the reasons for which cards have lowered their clocks now; empty if NVML fails."""
    try:
        with opened(nvml):
            ask = Questions(nvml)
            return {ask.uuid(handle): _brakes(ask, handle) for handle in ask.handles()}
    except nvml.NVMLError:
        return {}


@contextmanager
def opened(nvml: Any) -> Iterator[None]:
    """Initializes NVML, and shuts it down after the block."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


class Questions:
    """Calls NVML functions by name. Returns None if a function fails, or if the module does not have it."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def __call__(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        try:
            found = function(*arguments) if function is not None else None
        except self.nvml.NVMLError:
            return None
        return found.decode() if isinstance(found, bytes) else found

    def handles(self) -> list[Any]:
        """Returns a handle for each card of the machine, in NVML's order."""
        return [self.nvml.nvmlDeviceGetHandleByIndex(n) for n in range(self.nvml.nvmlDeviceGetCount())]

    def uuid(self, handle: Any) -> str:
        """Returns the UUID of a card in torch's form; empty if NVML does not report it."""
        return bare_uuid(self("nvmlDeviceGetUUID", handle) or "")


def _card(ask: Questions, handle: Any) -> Card:
    nvml, memory = ask.nvml, ask("nvmlDeviceGetMemoryInfo", handle)
    exclusive = (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
    modes = {nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited"} | dict.fromkeys(exclusive, "exclusive")
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    limit = ask("nvmlDeviceGetPowerManagementLimit", handle)
    usual = ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
    return Card(
        name=ask("nvmlDeviceGetName", handle) or "NVIDIA card",
        kind="nvidia",
        uuid=ask.uuid(handle),
        architecture="sm_{}{}".format(*capability) if capability else "",
        memory_nbytes=memory and memory.total,
        free_nbytes=memory and memory.free,
        pci=_pci(ask, handle),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_widest=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        temperature=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        brakes=_brakes(ask, handle),
        power_limit_watts=limit and limit / 1000,
        power_default_watts=usual and usual / 1000,
        compute_mode=modes.get(ask("nvmlDeviceGetComputeMode", handle), ""),
        mig=bool((ask("nvmlDeviceGetMigMode", handle) or [0])[0]),
        memory_errors=_memory_errors(ask, handle),
        tenants=tenants(ask, handle),
    )


def _pci(ask: Questions, handle: Any) -> str:
    """Returns the PCI address in the kernel's form: NVML writes the domain with eight digits, the kernel with four."""
    found = ask("nvmlDeviceGetPciInfo", handle)
    text = found.busId if found is not None else ""
    return (text.decode() if isinstance(text, bytes) else text).lower()[-12:]


def _brakes(ask: Questions, handle: Any) -> tuple[str, ...]:
    """Returns the reasons for which a card has lowered its clocks.

    Ignores the software power cap, at which a card under load usually runs. Some cards do not distinguish heat and
    power, and set only a common bit. All versions of the module know the functions by names with "Throttle".
    """
    nvml, reasons = ask.nvml, ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    bits = {"heat": heat, "power": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown}
    found = tuple(name for name, bit in bits.items() if reasons & bit)
    return found or ("heat or power",) * bool(reasons & nvml.nvmlClocksThrottleReasonHwSlowdown)


def _memory_errors(ask: Questions, handle: Any) -> int:
    """Counts the uncorrectable memory errors, plus 1 if repairs wait for a reset, and 1 if a repair failed."""
    which = (ask.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, ask.nvml.NVML_VOLATILE_ECC)
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    return int(ask("nvmlDeviceGetTotalEccErrors", handle, *which) or 0) + bool(pending) + bool(failed)


def tenants(ask: Questions, handle: Any) -> tuple[Tenant, ...]:
    """Returns the other processes that use memory of a card, except those that a container cannot see."""
    found = ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    others = [each for each in found if each.pid != os.getpid()]
    return tuple(Tenant(each.pid, each.usedGpuMemory or 0) for each in others)
