"""NVIDIA's cards and driver as the kernel tells of them, whether torch can use them or not.

The driver keeps ``/proc/driver/nvidia``, which its container toolkit shows in containers too: also with a CPU build of
torch, and without any library of NVIDIA's.
"""

from __future__ import annotations

import re
from pathlib import Path

from evener.hardware.procfs import text_of
from evener.hardware.survey.facts import Card

PROC = Path("/proc/driver/nvidia")


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
    )


def bare_uuid(text: str) -> str:
    """``GPU-8f...`` of the driver is ``8f...`` of torch."""
    return text.lower().removeprefix("gpu-")
