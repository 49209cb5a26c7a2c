"""Survey of a machine before training on it, as plain data.

A survey is taken on one machine and may be diagnosed on another: it is stored as JSON, and contains no judgement.
Unknown values are None or empty. :mod:`evener.hardware.diagnosis` finds problems from a survey only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FORMAT = "evener-survey-2"
"""Value of ``format`` in a survey file."""


@dataclass(frozen=True)
class Host:
    """The host's hardware, and the limits of this process."""

    name: str
    system: str
    """Kernel name and release."""
    machine: str
    """Architecture, such as ``x86_64`` or ``aarch64``."""
    processor: str
    cores: int
    """Number of logical cores of the machine."""
    allowed_cores: int
    """Number of cores that this process may run on."""
    memory_nbytes: int
    available_nbytes: int
    """Memory that is not in use."""
    cpu_quota: float | None = None
    """CPU time limit of the container, in cores; None if it is not limited."""
    memory_limit_nbytes: int | None = None
    """Memory limit of the container; None if it is not limited."""
    shm_nbytes: int | None = None
    """Size of ``/dev/shm``; None if it does not exist."""
    vectors: str = ""
    """Vector instructions that torch uses on this CPU, such as ``AVX512``."""

    @property
    def usable_cores(self) -> int:
        """Number of threads that can run at a time, at least 1."""
        quota = self.allowed_cores if self.cpu_quota is None else math.ceil(self.cpu_quota)
        return max(1, min(self.allowed_cores, quota))

    @property
    def usable_nbytes(self) -> int:
        """Memory of the machine, or the container's limit if it is less."""
        return min(self.memory_nbytes, self.memory_limit_nbytes or self.memory_nbytes)


@dataclass(frozen=True)
class Library:
    """A library that torch has loaded."""

    name: str
    """``cuDNN`` and ``NCCL``, or for ROCm ``MIOpen`` and ``RCCL``."""
    loaded: str
    """Version of the loaded library; empty if it could not be loaded."""
    packaged: str = ""
    """Version of the pip package that was installed with torch; empty if there is none."""
    error: str = ""
    """torch's error message if it does not accept the library."""


@dataclass(frozen=True)
class Software:
    """Software versions, and the devices that torch supports."""

    evener: str
    python: str
    torch: str
    cuda: str | None = None
    """CUDA version that torch was built with; None if it was built without."""
    hip: str | None = None
    """ROCm version that torch was built with; None if it was built without."""
    xpu: str | None = None
    architectures: tuple[str, ...] = ()
    """Architectures that torch has code for, such as ``sm_90``, ``compute_120`` (PTX) or ``gfx90a``."""
    accelerator: str | None = None
    """Device type that torch can use now, such as ``cuda`` (also for ROCm); None if there is only the CPU."""
    refusal: str = ""
    """torch's message if it found no accelerators."""
    libraries: tuple[Library, ...] = ()
    nvidia_driver: str | None = None
    driver_cuda: str | None = None
    """Newest CUDA version that the driver supports."""
    nvml: str = ""
    """Why NVIDIA's management library (NVML) could not be read; empty if it was read, or was not needed."""


@dataclass(frozen=True)
class Tenant:
    """Another process that uses memory of a card."""

    pid: int
    nbytes: int


@dataclass(frozen=True)
class Card:
    """An accelerator of the machine, whether torch sees it or not."""

    name: str
    kind: str
    """``nvidia``, ``amd``, or torch's name of the device type."""
    device: str | None = None
    """torch's name of the device, such as ``cuda:0``; None if torch does not see it."""
    uuid: str = ""
    architecture: str = ""
    """Architecture, such as ``sm_86`` or ``gfx90a``."""
    memory_nbytes: int | None = None
    free_nbytes: int | None = None
    pci: str = ""
    """PCI address, such as ``0000:3b:00.0``."""
    pcie_generation: int | None = None
    pcie_width: int | None = None
    """Number of PCIe lanes in use."""
    pcie_widest: int | None = None
    """Number of PCIe lanes that card and slot support."""
    temperature: int | None = None
    """Temperature in degrees Celsius."""
    brakes: tuple[str, ...] = ()
    """Reasons for which the card has lowered its clocks: ``heat``, ``power`` or ``heat or power``."""
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    compute_mode: str = ""
    """``default``, ``exclusive`` or ``prohibited``."""
    mig: bool = False
    memory_errors: int = 0
    """Uncorrectable memory errors since the driver was loaded, plus 1 if repairs wait for a reset, and 1 if a repair
    failed."""
    tenants: tuple[Tenant, ...] = ()

    def __str__(self) -> str:
        """Returns torch's name of the card, or else its PCI address, with the product name."""
        return f"{self.device or self.pci or 'a card'} ({self.name})"


@dataclass(frozen=True)
class Speed:
    """Measured speed of a device."""

    device: str
    """torch's name of the device."""
    products: dict[str, float] = field(default_factory=dict)
    """Floating-point operations per second of matrix products, by data type."""
    copy: float | None = None
    """Bytes per second of a copy within the device's memory; bytes read and bytes written both count."""
    from_host: float | None = None
    """Bytes per second of a copy from pinned host memory to the device."""
    to_host: float | None = None
    """Bytes per second of a copy from the device to pinned host memory."""
    error: str = ""
    """The error that ended the measurement; empty if there was none."""


@dataclass(frozen=True)
class MeasuredLink:
    """Measured latency and bandwidth of messages between the ranks ``a`` and ``b``."""

    a: int
    b: int
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Plan:
    """Planned use of the machine for training."""

    ranks: int
    """Number of ranks on this machine."""
    threads: int
    """Number of threads of each rank."""
    device: str
    """Device type of the ranks, such as ``cpu`` or ``cuda``."""
    workers: int | None = None
    """Number of data loading processes of each rank; None if it is not known."""
    balanced: bool = False
    """True if the work is balanced by the devices' speed."""


@dataclass(frozen=True)
class Survey:
    """Everything known about a machine: hardware, software, planned use and measurements."""

    host: Host
    software: Software
    plan: Plan
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that affect which devices torch sees, and how torch and NCCL work."""
    cards: tuple[Card, ...] = ()
    speeds: tuple[Speed, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    links_error: str = ""
    """Error that ended the measurement of links between ranks; empty if there was none."""

    @property
    def seen(self) -> tuple[Card, ...]:
        """The cards that torch sees."""
        return tuple(card for card in self.cards if card.device is not None)

    @property
    def used(self) -> tuple[Card, ...]:
        """The cards that the ranks use: one each, in torch's order."""
        return self.seen[: self.plan.ranks] if self.trains_on_cards else ()

    @property
    def trains_on_cards(self) -> bool:
        return self.plan.device != "cpu"
