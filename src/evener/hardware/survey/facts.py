"""What there is to know of a machine before training on it, as plain data.

A survey is taken on one machine and may be judged on another: it is JSON, holds no opinion, and what could not be found
out is None or empty. What is wrong with a machine is told by :mod:`evener.hardware.diagnosis`, of a survey alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FORMAT = "evener-survey-2"
"""What a file of a survey says that it is."""


@dataclass(frozen=True)
class Host:
    """The machine, and what this process may have of it."""

    name: str
    system: str
    """Kernel and its release."""
    machine: str
    """``x86_64``, ``aarch64``."""
    processor: str
    cores: int
    """Logical ones of the machine."""
    allowed_cores: int
    """Those that this process may run on."""
    memory_nbytes: int
    available_nbytes: int
    """Of the memory, what is not in use."""
    cpu_quota: float | None = None
    """Cores' worth of time that the container may use; None if it is not limited."""
    memory_limit_nbytes: int | None = None
    """What the container may use; None if it is not limited."""
    shm_nbytes: int | None = None
    """Size of ``/dev/shm``; None where there is none."""
    vectors: str = ""
    """The instructions that torch computes with on this CPU, such as ``AVX512``."""

    @property
    def usable_cores(self) -> int:
        """As many threads can run at a time."""
        quota = self.allowed_cores if self.cpu_quota is None else math.ceil(self.cpu_quota)
        return max(1, min(self.allowed_cores, quota))

    @property
    def usable_nbytes(self) -> int:
        """Memory of the machine or of the container, whichever is less."""
        return min(self.memory_nbytes, self.memory_limit_nbytes or self.memory_nbytes)


@dataclass(frozen=True)
class Library:
    """A library that torch has loaded."""

    name: str
    """``cuDNN`` and ``NCCL``, or ``MIOpen`` and ``RCCL`` of ROCm."""
    loaded: str
    """Its version; empty if it could not be loaded."""
    packaged: str = ""
    """The version that was installed with torch, from the package index; empty if none was."""
    error: str = ""
    """What torch says of it, if it refuses it."""


@dataclass(frozen=True)
class Software:
    """Versions, and what torch says that it can use."""

    evener: str
    python: str
    torch: str
    cuda: str | None = None
    """The CUDA that torch was built with."""
    hip: str | None = None
    """The ROCm that torch was built with."""
    xpu: str | None = None
    architectures: tuple[str, ...] = ()
    """For which torch holds code: ``sm_90``, ``compute_120`` (PTX), ``gfx90a``."""
    accelerator: str | None = None
    """The kind of device that torch can use now, such as ``cuda``, which ROCm's are too; None for the CPU alone."""
    refusal: str = ""
    """What torch said when it was asked for accelerators and found none."""
    libraries: tuple[Library, ...] = ()
    nvidia_driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA that the driver knows."""
    nvml: str = ""
    """Why NVIDIA's management library could not be asked; empty if it was, or there was no reason to."""


@dataclass(frozen=True)
class Tenant:
    """Another process that has memory of a card."""

    pid: int
    nbytes: int


@dataclass(frozen=True)
class Card:
    """An accelerator of the machine, whether torch sees it or not."""

    name: str
    kind: str
    """``nvidia``, ``amd``, or what torch calls the kind of device."""
    device: str | None = None
    """The name that torch has for it, such as ``cuda:0``; None if torch does not see it."""
    uuid: str = ""
    architecture: str = ""
    """``sm_86``, ``gfx90a``."""
    memory_nbytes: int | None = None
    free_nbytes: int | None = None
    pci: str = ""
    """Where it is, as ``0000:3b:00.0``."""
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_widest: int | None = None
    """Lanes that card and slot could have."""
    temperature: int | None = None
    """In degrees Celsius."""
    brakes: tuple[str, ...] = ()
    """Why its clocks are low: ``heat`` or ``power``."""
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    compute_mode: str = ""
    """``default``, ``exclusive`` or ``prohibited``."""
    mig: bool = False
    memory_errors: int = 0
    """Errors since the driver was loaded that could not be corrected, and repairs that wait for a reset."""
    tenants: tuple[Tenant, ...] = ()

    def __str__(self) -> str:
        """Names the card as torch does, or else by its place."""
        return f"{self.device or self.pci or 'a card'} ({self.name})"


@dataclass(frozen=True)
class Speed:
    """What a device does, as measured."""

    device: str
    """As torch calls it."""
    products: dict[str, float] = field(default_factory=dict)
    """Of matrices: floating-point operations a second, by type of the numbers."""
    copy: float | None = None
    """Bytes a second, read and written both counted, from a place in its memory to another."""
    from_host: float | None = None
    """Bytes a second, from pinned memory."""
    to_host: float | None = None
    error: str = ""
    """Why it could not be measured to the end."""


@dataclass(frozen=True)
class MeasuredLink:
    """A message between two ranks, as measured."""

    a: int
    b: int
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Plan:
    """Who is to train on the machine."""

    ranks: int
    """On this machine."""
    threads: int
    """Of each rank."""
    device: str
    """``cpu`` or ``cuda``."""
    workers: int | None = None
    """Processes of each rank that load data; None if that is not known."""
    balanced: bool = False
    """Whether what devices get goes by what they can."""


@dataclass(frozen=True)
class Survey:
    """A machine."""

    host: Host
    software: Software
    plan: Plan
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, those that decide what torch sees, and how it and NCCL work."""
    cards: tuple[Card, ...] = ()
    speeds: tuple[Speed, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    links_error: str = ""
    """Why ranks could not talk to each other."""

    @property
    def seen(self) -> tuple[Card, ...]:
        """The cards that torch sees."""
        return tuple(card for card in self.cards if card.device is not None)

    @property
    def used(self) -> tuple[Card, ...]:
        """The cards that ranks take: one each, in torch's order."""
        return self.seen[: self.plan.ranks] if self.trains_on_cards else ()

    @property
    def trains_on_cards(self) -> bool:
        return self.plan.device != "cpu"
