"""Reads NVIDIA cards and their driver from the kernel, whether torch can use them or not.

The driver provides ``/proc/driver/nvidia``. NVIDIA's container toolkit makes it visible in containers. It works with a
CPU build of torch too, and without any of NVIDIA's libraries.
"""

from __future__ import annotations

import re
from pathlib import Path

from evener.hardware.procfs import text_of
from evener.hardware.survey.facts import Card

PROC = Path("/proc/driver/nvidia")


def nvidia_driver(proc: Path = PROC) -> str | None:
    """Returns the version of NVIDIA's kernel module. Returns None if it is not loaded."""
    first = (text_of(proc / "version").splitlines() or [""])[0]
    found = re.search(r"\b\d{3,}(\.\d+)+\b", first)
    return found[0] if found else None


def nvidia_cards(proc: Path = PROC) -> tuple[Card, ...]:
    """Returns the NVIDIA cards, in the order of their PCI addresses."""
    return tuple(_nvidia_card(place) for place in sorted(proc.glob("gpus/*")))


def _nvidia_card(place: Path) -> Card:
    lines = (line.partition(":") for line in text_of(place / "information").splitlines())
    said = {key.strip(): value.strip() for key, _, value in lines}
    return Card(
        name=said.get("Model", "NVIDIA card"),
        kind="nvidia",
        uuid=bare_uuid(said.get("GPU UUID", "")),
        pci=place.name.lower(),
    )


def bare_uuid(text: str) -> str:
    """Converts the driver's form of a UUID to torch's form: ``GPU-8f...`` to ``8f...``."""
    return text.lower().removeprefix("gpu-")
