"""What can be wrong with a machine, as a list of kinds, each with its remedy.

The page on devices shows this list; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["wrong", "slow", "note"]
LEVELS: dict[Level, str] = {
    "wrong": "a device that torch is there for cannot train",
    "slow": "it trains, slower or less safely than it could",
    "note": "worth knowing; nothing need be done",
}
"""From the worst on."""


@dataclass(frozen=True)
class Kind:
    """One thing that can be wrong."""

    name: str
    level: Level
    when: str
    remedy: str

    def found(self, seen: str) -> Finding:
        """It is so here; ``seen`` says what was seen, with its values."""
        return Finding(self.level, self.name, seen, self.remedy)


@dataclass(frozen=True)
class Finding:
    """What is wrong with a machine, and what to do about it."""

    level: Level
    name: str
    seen: str
    remedy: str

    @property
    def words(self) -> str:
        """In one line."""
        return f"{self.level}: {self.seen}; {self.remedy}"


def sorted_by_level(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The worst first; of one level in the order in which they were found."""
    order = list(LEVELS)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.level)))


DRIVER_TOO_OLD = Kind(
    "driver-too-old",
    "wrong",
    "NVIDIA's driver is older than the CUDA of this torch can run with",
    "update the driver, or install a torch that was built for an older CUDA "
    "(https://pytorch.org/get-started/previous-versions)",
)
DRIVER_MISMATCH = Kind(
    "driver-mismatch",
    "wrong",
    "the driver's module in the kernel and its libraries are of different versions, as after an update",
    "restart the machine, or load the driver's modules anew; in a container, start it again",
)
CARD_UNSUPPORTED = Kind(
    "card-unsupported",
    "wrong",
    "torch holds no code that a card can run: it is too old for this build, or too new",
    "install a torch that was built for it (for old cards the build for the oldest CUDA has the most: "
    "https://pytorch.org/get-started/previous-versions), or hide the card with CUDA_VISIBLE_DEVICES",
)
PTX_TOO_NEW = Kind(
    "ptx-too-new",
    "wrong",
    "for a card torch has PTX alone, and the driver, which must translate it, is older than the CUDA that made it",
    "update the driver, or install a torch that was built for the card",
)
NO_ACCESS = Kind(
    "no-access",
    "wrong",
    "torch was built for the cards that are there, none is hidden, and it can use none",
    "look at what torch says; in a container pass the devices on (docker run --gpus all, or --device /dev/kfd "
    "--device /dev/dri), elsewhere see the rights on /dev/nvidia* or /dev/kfd",
)
LIBRARY_REFUSED = Kind(
    "library-refused",
    "wrong",
    "torch cannot work with the cuDNN or NCCL that was loaded",
    "take the directory of another version out of LD_LIBRARY_PATH, and install torch again with its packages",
)
CARD_FAILS = Kind(
    "card-fails",
    "wrong",
    "a product of matrices fails on a device",
    "look at what torch says, and at the kernel's log (dmesg) for lines of NVRM or amdgpu",
)
RANKS_FAIL = Kind(
    "ranks-fail",
    "wrong",
    "ranks of this machine cannot start, or cannot send each other messages",
    "look at the error; on GPUs run again with NCCL_DEBUG=INFO, and with NCCL_P2P_DISABLE=1 or "
    "NCCL_SHM_DISABLE=1 to find the way that fails",
)
PROHIBITED = Kind(
    "compute-prohibited",
    "wrong",
    "a card is set to compute nothing",
    "nvidia-smi --compute-mode=DEFAULT, as root",
)

CPU_BUILD = Kind(
    "cpu-build",
    "slow",
    "there are cards, and torch was built without support for them",
    "install a torch for them (https://pytorch.org/get-started)",
)
UNUSED_KIND = Kind(
    "unused-kind",
    "slow",
    "torch sees accelerators of a kind that Evener takes only when asked",
    "ask for them with --device, such as --device xpu; they go through torch.accelerator, and nothing was run on any",
)
ALL_HIDDEN = Kind(
    "all-hidden",
    "slow",
    "a variable of the environment hides all cards from torch",
    "unset it, or name cards that are there, counted from 0; it is right where you want the CPU",
)
OVERSUBSCRIBED = Kind(
    "threads-oversubscribed",
    "slow",
    "the ranks have more threads together than cores are free for them",
    "unset OMP_NUM_THREADS, or set it to the cores of a rank",
)
LITTLE_MEMORY = Kind(
    "little-memory",
    "slow",
    "the ranks have less than 512 MiB of the machine's memory each",
    "start fewer ranks, or raise the container's limit",
)
SMALL_SHM = Kind(
    "small-shm",
    "slow",
    "`/dev/shm` is smaller than 1 GiB; workers that load data, and NCCL, put batches and messages there, and die "
    "when it is full; CPU ranks keep gradients there, and copy them where it is",
    "start the container with --shm-size=8g or --ipc=host",
)
NO_VECTORS = Kind(
    "no-vectors",
    "slow",
    "torch computes without the CPU's vector instructions",
    "unset ATEN_CPU_CAPABILITY; in a virtual machine, let it see the host's CPU",
)
SLOW_VARIABLE = Kind(
    "slow-variable",
    "slow",
    "a variable of the environment slows down every step; it is meant for finding errors",
    "unset it when they are found",
)
MIXED = Kind(
    "mixed-cards",
    "slow",
    "cards that torch sees are not alike: with equal shares all wait for the slowest",
    "leave --balance out, or say auto, where ranks divide samples: each card gets what it can compute; with --strategy "
    "sharded also what it can hold",
)
NO_PEER = Kind(
    "no-peer-access",
    "slow",
    "cards cannot read each other's memory, so that what they exchange goes through the host's",
    "switch off IOMMU and ACS in the BIOS, or in a virtual machine pass the cards on together; many consumer cards "
    "never can: send less, with larger batches or --compress",
)
IN_USE = Kind(
    "card-in-use",
    "slow",
    "other processes have more than 256 MiB, or a tenth, of a card's memory",
    "end them, or choose other cards with CUDA_VISIBLE_DEVICES",
)
BRAKED = Kind(
    "card-braked",
    "slow",
    "a card has lowered its clocks because of heat, or of its power supply",
    "see to fans, dust, air and power cables; until then --balance auto gives it less",
)
NARROW = Kind(
    "narrow-slot",
    "slow",
    "a card uses fewer lanes of PCIe than card and slot could",
    "push the card home, or move it to a slot with all lanes; the machine's manual says which share theirs",
)
MEMORY_ERRORS = Kind(
    "memory-errors",
    "slow",
    "a card's memory had errors that could not be corrected, or waits for a reset to be repaired",
    "reset the card (nvidia-smi --gpu-reset) or restart; if it happens again, have the card replaced",
)
EXCLUSIVE = Kind(
    "compute-exclusive",
    "note",
    "only one process at a time can use a card, so that a leftover one keeps a new run out",
    "nvidia-smi --compute-mode=DEFAULT, as root, if that is not meant",
)
UNEVEN = Kind(
    "uneven-cards",
    "slow",
    "a card is slower by a fifth than another of the same name",
    "look for heat, power limits, other processes, and the slot; --balance auto gives it less",
)
UNEVEN_LINKS = Kind(
    "uneven-links",
    "slow",
    "messages between two ranks take three times as long as is usual between the others",
    "look at the topology: the way between the two may lead over another socket, or a slot with few lanes",
)

RANKS_OVER_CORES = Kind(
    "ranks-over-cores",
    "note",
    "there are more CPU ranks than cores are free for them",
    "start fewer, unless this is a rehearsal",
)
DRIVER_BEHIND = Kind(
    "driver-behind",
    "note",
    "NVIDIA's driver is older than the CUDA of this torch, but of its major version: it cannot translate PTX alone",
    "update the driver if a kernel is reported as unsupported",
)
SOME_HIDDEN = Kind(
    "some-hidden",
    "note",
    "a variable of the environment hides some cards from torch",
    "unset it if all are to train",
)
OTHER_LIBRARY = Kind(
    "other-library",
    "note",
    "another cuDNN or NCCL is loaded than was installed with torch",
    "look for its directory in LD_LIBRARY_PATH if results or speed are odd",
)
QUOTA = Kind(
    "cpu-quota",
    "note",
    "the container may use less time of the CPU than it sees cores; programs that count cores start too many threads",
    "raise the quota; Evener counts the quota",
)
MEMORY_LIMIT = Kind(
    "memory-limit",
    "note",
    "the container may use less memory than the machine has; a process that takes more is killed",
    "raise the limit if ranks or workers are killed",
)
FAR_APART = Kind(
    "far-apart",
    "note",
    "cards reach each other over the link between CPU sockets only",
    "keep axes of a mesh that send much (tensor, context) on cards of one socket",
)
POWER_LIMIT = Kind(
    "power-limit",
    "note",
    "a card's power limit was set below its maker's",
    "nvidia-smi --power-limit=WATTS, as root, if that is not meant",
)
PARTITIONED = Kind(
    "card-partitioned",
    "note",
    "a card is divided by MIG; a process sees one part of it, and parts cannot talk over NCCL",
    "nvidia-smi --multi-instance-gpu=0, as root, to train on whole cards",
)
NOT_ASKED = Kind(
    "nvml-not-asked",
    "note",
    "NVIDIA's management library said nothing, so heat, other processes, slots and NVLink are not known",
    "pip install nvidia-ml-py",
)

KINDS = tuple(value for value in dict(globals()).values() if isinstance(value, Kind))
"""In the order of the page: as they stand above."""
