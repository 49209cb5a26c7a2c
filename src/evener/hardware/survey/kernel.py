"""Cards and drivers as the kernel tells of them, whether torch can use them or not.

NVIDIA's driver keeps ``/proc/driver/nvidia``, which its container toolkit shows in containers too; AMD's has
``/sys/class/kfd``. Both are there with a CPU build of torch, and without any library of the maker's.
"""

from __future__ import annotations

import re
from pathlib import Path

from evener.hardware.procfs import text_of
from evener.hardware.survey.facts import Card

PROC = Path("/proc/driver/nvidia")
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
AMD = Path("/sys/module/amdgpu/version")
PCI = Path("/sys/bus/pci/devices")


def nvidia_driver(proc: Path = PROC) -> str | None:
    """The version of NVIDIA's kernel module; None if it is not loaded."""
    first = (text_of(proc / "version").splitlines() or [""])[0]
    found = re.search(r"\b\d{3,}(\.\d+)+\b", first)
    return found[0] if found else None


def nvidia_cards(proc: Path = PROC) -> tuple[Card, ...]:
    """In the order of their places on the bus."""
    return tuple(_nvidia_card(place) for place in sorted(proc.glob("gpus/*")))


def _nvidia_card(place: Path) -> Card:
    lines = (line.partition(":") for line in text_of(place / "information").splitlines())
    said = {key.strip(): value.strip() for key, _, value in lines}
    return Card(
        name=said.get("Model", "NVIDIA card"),
        kind="nvidia",
        uuid=bare_uuid(said.get("GPU UUID", "")),
        pci=place.name.lower(),
        numa=numa_of(place.name),
    )


def amd_driver(file: Path = AMD) -> str | None:
    """The version of a driver that was installed by itself; that of the kernel has none of its own."""
    return text_of(file) or None


def amd_cards(nodes: Path = KFD) -> tuple[Card, ...]:
    """Nodes of the driver for computing that are no CPUs."""
    found = sorted((int(place.name), place) for place in nodes.glob("[0-9]*"))
    said = [_properties(place / "properties") for _, place in found]
    return tuple(_amd_card(each) for each in said if each.get("simd_count", 0) > 0)


def _amd_card(said: dict[str, int]) -> Card:
    version = said.get("gfx_target_version", 0)
    place = said.get("location_id", 0)
    pci = f"{said.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
    return Card(name="AMD card", kind="amd", architecture=architecture, pci=pci, numa=numa_of(pci))


def _properties(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in text_of(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def numa_of(pci: str, devices: Path = PCI) -> int | None:
    """The NUMA node that a place on the bus is near to; None if the machine has but one, or does not say."""
    text = text_of(devices / pci / "numa_node")
    return int(text) if text.isdecimal() else None


def bare_uuid(text: str) -> str:
    """``GPU-8f...`` of the driver is ``8f...`` of torch."""
    return text.lower().removeprefix("gpu-")
