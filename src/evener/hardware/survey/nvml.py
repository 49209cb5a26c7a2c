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

from evener.hardware.survey.facts import Card, Path, Tenant
from evener.hardware.survey.kernel import bare_uuid, numa_of

# Numbers of nvml.h, which are the same in all versions; not every version of the module has names for them.
_HEAT = 0x20 | 0x40
"""nvmlClocksEventReasonSwThermalSlowdown and ...HwThermalSlowdown."""
_POWER = 0x80
"""nvmlClocksEventReasonHwPowerBrakeSlowdown; the cap that software sets is the usual end of a card under load."""
_SLOWDOWN = 0x08
"""nvmlClocksEventReasonHwSlowdown, which is set with both of them, and alone by cards that do not tell them apart."""
_LEVELS = {0: "board", 10: "switch", 20: "switches", 30: "host bridge", 40: "node", 50: "system"}
"""nvmlGpuTopologyLevel_t."""
_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
"""nvmlComputeMode_t; the exclusiveness of a thread (1) has become that of a process (3)."""
_MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS; a card refuses those that it has not."""
_GPU_SENSOR, _UNCORRECTED, _VOLATILE, _NVLINK = 0, 1, 0, 2


@dataclass(frozen=True)
class Answers:
    """What the library said of a machine."""

    driver: str | None = None
    cuda: str | None = None
    cards: tuple[Card, ...] = ()
    paths: tuple[Path, ...] = ()
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
    """All that is to be known of the cards and the ways between them.

    Args:
        nvml: The module ``pynvml``, or what stands in for it.
    """
    try:
        with opened(nvml):
            handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
            ask = Questions(nvml)
            return Answers(
                driver=ask("nvmlSystemGetDriverVersion"),
                cuda=_cuda(ask("nvmlSystemGetCudaDriverVersion_v2")),
                cards=tuple(_card(ask, handle) for handle in handles),
                paths=tuple(
                    _path(ask, handles, a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))
                ),
            )
    except nvml.NVMLError as error:
        return Answers(refusal=str(error))


def ask_brakes(nvml: Any) -> dict[str, tuple[str, ...]]:
    """Of each card, by its uuid, why its clocks are low now; empty where nobody answers."""
    try:
        with opened(nvml):
            handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
            ask = Questions(nvml)
            return {_uuid(ask, handle): _brakes(ask, handle) for handle in handles}
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
        self._nvml = nvml

    def __call__(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        try:
            found = function(*arguments) if function is not None else None
        except self._nvml.NVMLError:
            return None
        return found.decode() if isinstance(found, bytes) else found


def _card(ask: Questions, handle: Any) -> Card:
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    pci = _pci(ask, handle)
    return Card(
        name=ask("nvmlDeviceGetName", handle) or "NVIDIA card",
        kind="nvidia",
        uuid=_uuid(ask, handle),
        architecture=_architecture(ask("nvmlDeviceGetCudaComputeCapability", handle)),
        memory_nbytes=memory and memory.total,
        free_nbytes=memory and memory.free,
        pci=pci,
        numa=numa_of(pci),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_widest=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        temperature=ask("nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
        brakes=_brakes(ask, handle),
        power_limit_watts=_watts(ask("nvmlDeviceGetPowerManagementLimit", handle)),
        power_default_watts=_watts(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        compute_mode=_MODES.get(ask("nvmlDeviceGetComputeMode", handle), ""),
        mig=bool((ask("nvmlDeviceGetMigMode", handle) or [0])[0]),
        memory_errors=_memory_errors(ask, handle),
        tenants=tenants(ask, handle),
    )


def _uuid(ask: Questions, handle: Any) -> str:
    return bare_uuid(ask("nvmlDeviceGetUUID", handle) or "")


def _pci(ask: Questions, handle: Any) -> str:
    """The library has eight digits for the domain, the kernel four."""
    found = ask("nvmlDeviceGetPciInfo", handle)
    text = found.busId if found is not None else ""
    return (text.decode() if isinstance(text, bytes) else text).lower()[-12:]


def _architecture(capability: Any) -> str:
    return "sm_{}{}".format(*capability) if capability else ""


def _brakes(ask: Questions, handle: Any) -> tuple[str, ...]:
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # its name before driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    found = [name for name, bits in (("heat", _HEAT), ("power", _POWER)) if reasons & bits]
    return tuple(found or (["heat or power"] if reasons & _SLOWDOWN else []))


def _memory_errors(ask: Questions, handle: Any) -> int:
    errors = ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE) or 0
    remapped = ask("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    return int(errors) + int(bool(remapped[2])) + int(bool(remapped[3]))  # pending, failed


def tenants(ask: Questions, handle: Any) -> tuple[Tenant, ...]:
    """Other processes that have memory of a card; those that a container cannot see are not told of."""
    found = ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    others = [each for each in found if each.pid != os.getpid()]
    return tuple(Tenant(each.pid, each.usedGpuMemory or 0) for each in others)


def _path(ask: Questions, handles: list[Any], a: int, b: int) -> Path:
    level = ask("nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b])
    joined = ask("nvmlDeviceGetP2PStatus", handles[a], handles[b], _NVLINK) == 0
    return Path(a, b, _nvlinks(ask, handles, a, b) if joined else 0, _LEVELS.get(level, ""))


def _nvlinks(ask: Questions, handles: list[Any], a: int, b: int) -> int:
    """Links of ``a`` that lead to ``b``, or where they all lead to switches, that lead there."""
    ends = [_far_end(ask, handles[a], link) for link in range(_MOST_LINKS) if _is_up(ask, handles[a], link)]
    cards = {_pci(ask, handle) for handle in handles}
    return sum(end == _pci(ask, handles[b]) or end not in cards for end in ends)


def _is_up(ask: Questions, handle: Any, link: int) -> bool:
    return bool(ask("nvmlDeviceGetNvLinkState", handle, link))


def _far_end(ask: Questions, handle: Any, link: int) -> str:
    found = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    text = found.busId if found is not None else ""
    return (text.decode() if isinstance(text, bytes) else text).lower()[-12:]


def _cuda(number: int | None) -> str | None:
    """``12040`` is 12.4."""
    return None if not number else f"{number // 1000}.{number % 1000 // 10}"


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
