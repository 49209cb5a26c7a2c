"""The machines of a plan: cards and links, as plain data, and how they are described.

:func:`evener.tools.plan.cluster_file.read_cluster` reads them from a file. Figures of the catalogue are peaks, and
measurements are marked as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from evener.collectives.tuning.cost import Link


@dataclass(frozen=True)
class PlannedLink:
    """What one rank can send to another, in one direction."""

    latency_seconds: float
    bytes_per_second: float
    is_measured: bool = False

    @property
    def cost(self) -> Link:
        """The link in the cost model of the collectives."""
        return Link(self.latency_seconds, 1 / self.bytes_per_second)

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:.3g} GB/s, {self.latency_seconds * 1e6:.3g} us"


@dataclass(frozen=True)
class PlannedCard:
    """A device on which one rank of a plan computes: a card, or a rank's part of the CPU."""

    name: str
    kind: str
    """torch's name of the device type, such as ``cuda`` (also for AMD's cards) or ``cpu``."""
    flops: Mapping[str, float]
    """Floating-point operations per second of dense matrix products, by data type. ``tf32`` is float32 on the tensor
    cores of NVIDIA's cards. A data type that is missing is not known."""
    memory_nbytes: int
    memory_bytes_per_second: float
    workspace_nbytes: int
    """Memory that a process takes besides its tensors."""
    price_per_hour: float | None
    """Its part of the price of the machine; None if that is not known."""
    is_measured: bool
    """True if its speed was measured."""


@dataclass(frozen=True)
class Machine:
    """One machine of a plan."""

    name: str
    cards: tuple[PlannedCard, ...]
    """The cards, in the order of ranks."""
    inside: PlannedLink
    """The slowest link of a ring over the cards. With one card, it is not used."""
    cores: int
    """Number of cores of the CPU; 0 if it is not known."""

    @property
    def is_measured(self) -> bool:
        """True if its cards and the links between them were measured."""
        return all(card.is_measured for card in self.cards) and (
            len(self.cards) == 1 or self.inside.is_measured
        )


@dataclass(frozen=True)
class FailureRates:
    """How often devices fail, what a failure costs, and how unequal the times of alike devices are."""

    mean_days_of_a_device: float = 16_384 * 54 / 466
    """Mean days until a device, or what belongs to it, fails. By default as often as in a run on 16,384 GPUs, which had
    466 interruptions in 54 days (Llama 3, arXiv 2407.21783)."""
    checkpoint_stall_seconds: float = 5.0
    """Seconds in which training stands still for a checkpoint. The default is a round figure."""
    recovery_seconds: float = 600.0
    """Seconds from a failure until the run trains again. The default is a round figure."""
    spread: float = 0.09
    """Standard deviation of the time of a device's step over its mean, as on 64,000 GPUs (PRISM, arXiv 2510.15596)."""


@dataclass(frozen=True)
class Cluster:
    """All machines of a plan."""

    machines: tuple[Machine, ...]
    between: PlannedLink
    """The link from a machine to another, by all its network cards together. Its ranks share it. With one machine, it
    is not used."""
    failures: FailureRates = FailureRates()

    @cached_property
    def ranks(self) -> tuple[tuple[int, PlannedCard], ...]:
        """For each rank the index of its machine, and its card."""
        return tuple((n, card) for n, machine in enumerate(self.machines) for card in machine.cards)

    def link(self, a: int, b: int) -> PlannedLink:
        """Returns the link between two ranks."""
        one, other = self.ranks[a][0], self.ranks[b][0]
        return self.machines[one].inside if one == other else self.between

    @property
    def is_measured(self) -> bool:
        """True if all machines and the link between them were measured."""
        alone = len(self.machines) == 1
        return all(machine.is_measured for machine in self.machines) and (alone or self.between.is_measured)

    @property
    def price_per_hour(self) -> float | None:
        """The price of all machines; None if one of them has none."""
        return self.price_of(len(self.ranks))

    def price_of(self, ranks: int) -> float | None:
        """Returns the price per hour of the machines on which the first ``ranks`` ranks are; None if one of them has
        none."""
        machines = self.machines[: self.ranks[ranks - 1][0] + 1]
        prices = [card.price_per_hour for machine in machines for card in machine.cards]
        return None if None in prices else math.fsum(price for price in prices if price is not None)


def describe(cluster: Cluster) -> str:
    """Returns a line for each kind of machine, and for the link between them, with the source of the figures."""
    price = f", {cluster.price_per_hour:.2f} per hour" if cluster.price_per_hour is not None else ""
    lines = [f"machines: {len(cluster.machines)}, ranks: {len(cluster.ranks)}{price}"]
    for machine, alike in groupby(cluster.machines):
        cards = cards_text(machine.cards)
        name = "" if machine.name == cards else f"{machine.name}, "
        inside = f", joined by {machine.inside}" if len(machine.cards) > 1 else ""
        part = any(card.is_measured for card in machine.cards) or (inside and machine.inside.is_measured)
        source = "measured" if machine.is_measured else "measured in part" if part else "catalogue"
        lines.append(f"{len([*alike])} of {name}{cards}{inside} ({source})")
    if len(cluster.machines) > 1:
        source = "measured" if cluster.between.is_measured else "not measured"
        lines.append(f"between machines: {cluster.between} ({source})")
    return "\n".join(lines)


def cards_text(cards: Sequence[PlannedCard]) -> str:
    """Returns number and name of the cards, such as ``8 x H100 SXM``."""
    return " + ".join(f"{len([*alike])} x {name}" for name, alike in groupby(card.name for card in cards))
