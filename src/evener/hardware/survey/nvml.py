"""Cards as NVIDIA's management library tells of them: what torch cannot know, such as heat and other processes.

``nvidia-ml-py`` is asked where it is installed (``pip install nvidia-ml-py``), and never needed. A card answers some
questions and not others, by its kind, the driver and the rights of the user: what is not answered is left open.
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
    """What the library said of a machine."""

    driver: str | None = None
    cuda: str | None = None
    cards: tuple[Card, ...] = ()
    refusal: str = ""
    """Why it said nothing."""


def find_nvml() -> Any:
    """The module of ``nvidia-ml-py``; None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older package of the same name warns of itself
        try:
            return importlib.import_module("pynvml")
        except ImportError:
            return None


def ask_nvml(nvml: Any) -> Answers:
    """All that the library says of the driver and the cards.

    Args:
        nvml: The module ``pynvml``, or what stands in for it.
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
    """Of each card, by its uuid, why its clocks are low now; empty where nobody answers."""
    try:
        with opened(nvml):
            ask = Questions(nvml)
            return {ask.uuid(handle): _brakes(ask, handle) for handle in ask.handles()}
    except nvml.NVMLError:
        return {}


@contextmanager
def opened(nvml: Any) -> Iterator[None]:
    """The library may be asked in the block."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


class Questions:
    """Calls functions of the library by name; what one cannot answer, or the module does not know, is None."""

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
        """One for each card of the machine, in the library's order."""
        return [self.nvml.nvmlDeviceGetHandleByIndex(n) for n in range(self.nvml.nvmlDeviceGetCount())]

    def uuid(self, handle: Any) -> str:
        """The name of a card as torch has it; empty if the library does not say."""
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
    """The library has eight digits for the domain, the kernel four."""
    found = ask("nvmlDeviceGetPciInfo", handle)
    text = found.busId if found is not None else ""
    return (text.decode() if isinstance(text, bytes) else text).lower()[-12:]


def _brakes(ask: Questions, handle: Any) -> tuple[str, ...]:
    """Why the clocks are low. The cap that software sets on power is the usual end of a card under load, and no reason.

    Some cards do not tell heat from power, and set the bit for both alone. "Throttle" is the name that all versions of
    the module have.
    """
    nvml, reasons = ask.nvml, ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    bits = {"heat": heat, "power": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown}
    found = tuple(name for name, bit in bits.items() if reasons & bit)
    return found or ("heat or power",) * bool(reasons & nvml.nvmlClocksThrottleReasonHwSlowdown)


def _memory_errors(ask: Questions, handle: Any) -> int:
    """Errors that could not be corrected, one more for a repair that waits for a reset, and one for a failed repair."""
    which = (ask.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, ask.nvml.NVML_VOLATILE_ECC)
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    return int(ask("nvmlDeviceGetTotalEccErrors", handle, *which) or 0) + bool(pending) + bool(failed)


def tenants(ask: Questions, handle: Any) -> tuple[Tenant, ...]:
    """Other processes that have memory of a card; those that a container cannot see are not told of."""
    found = ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    others = [each for each in found if each.pid != os.getpid()]
    return tuple(Tenant(each.pid, each.usedGpuMemory or 0) for each in others)
