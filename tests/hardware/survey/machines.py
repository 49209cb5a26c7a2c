"""Machines that are not at hand, as surveys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evener.hardware.survey.facts import Card, Host, Library, Plan, Software, Survey

GIB = 1 << 30
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU130 = (*CU128[:-1], "compute_120")


def host(**changes: Any) -> Host:
    usual: dict[str, Any] = {
        "name": "node",
        "system": "Linux 6.8.0",
        "machine": "x86_64",
        "processor": "A processor",
        "cores": 64,
        "allowed_cores": 64,
        "memory_nbytes": 512 * GIB,
        "available_nbytes": 500 * GIB,
        "shm_nbytes": 256 * GIB,
        "vectors": "AVX512",
    }
    return Host(**(usual | changes))


def software(**changes: Any) -> Software:
    """A torch for CUDA 12.8 that goes with its driver."""
    usual: dict[str, Any] = {
        "evener": "0.1.0",
        "python": "3.12.3",
        "torch": "2.13.0+cu128",
        "cuda": "12.8",
        "architectures": CU128,
        "accelerator": "cuda",
        "libraries": (Library("cuDNN", "9.10.2", "9.10.2.21"), Library("NCCL", "2.27.3", "2.27.3")),
        "nvidia_driver": "570.124.06",
        "driver_cuda": "12.8",
    }
    return Software(**(usual | changes))


def card(
    number: int = 0, name: str = "NVIDIA GeForce RTX 3090", architecture: str = "sm_86", **changes: Any
) -> Card:
    usual: dict[str, Any] = {
        "kind": "nvidia",
        "device": f"cuda:{number}",
        "uuid": f"uuid-{number}",
        "memory_nbytes": 24 * GIB,
        "free_nbytes": 23 * GIB,
        "pci": f"0000:{number + 1:02x}:00.0",
        "pcie_generation": 4,
        "pcie_width": 16,
        "pcie_widest": 16,
        "temperature": 40,
        "compute_mode": "default",
    }
    return Card(name=name, architecture=architecture, **(usual | changes))


def survey(*cards: Card, ranks: int | None = None, threads: int = 1, **parts: Any) -> Survey:
    """A machine that is well."""
    device = "cuda" if any(each.device for each in cards) else "cpu"
    usual: dict[str, Any] = {
        "host": host(),
        "software": software(),
        "plan": Plan(ranks or max(1, len(cards)), threads, device),
        "cards": cards,
    }
    return Survey(**(usual | parts))


def on_cpu(**parts: Any) -> Survey:
    """A machine without cards, and a torch for CPUs."""
    built = Software("0.1.0", "3.12.3", "2.13.0+cpu")
    return survey(**({"software": built, "ranks": 4} | parts))


def h100_node() -> Survey:
    """Eight cards that are alike and well."""
    cards = [
        card(n, "NVIDIA H100 80GB HBM3", "sm_90", memory_nbytes=80 * GIB, pcie_generation=5) for n in range(8)
    ]
    return survey(*cards)


def mixed_cards() -> Survey:
    """A 3090 and a 4090, which have 24 GiB each."""
    return survey(card(0), card(1, "NVIDIA GeForce RTX 4090", "sm_89"))


def k80() -> Survey:
    """A card of 2014 and a torch of today."""
    built = software(
        torch="2.13.0+cu126", cuda="12.6", architectures=CU126, nvidia_driver="470.256.02", driver_cuda=None
    )
    return survey(
        card(0, "Tesla K80", "sm_37", device=None), software=replace(built, accelerator=None), ranks=1
    )
