"""Costs of a step on devices that are not at hand: operations over speed, and messages over links.

::

    passes     operations / (peak of the card x efficiency) + bytes that operators move / memory bandwidth
    messages   rounds x latency + bytes / bandwidth      of a ring, within machines first and then between them
    update     bytes of weights, gradients and optimizer state that it reads and writes / memory bandwidth

A sum of n bytes over the g ranks of a machine, on each of N machines, takes by the two-level ring algorithm

    2 (g - 1) (l + n / (g b))  +  2 (N - 1) (L + n s / (N B))

with latency l and bandwidth b inside and L, B between. ``s`` groups of a machine share its connection with others
(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, for the ring;
the levels are those of NCCL's documentation). A scatter of sums or a gather is half of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from evener.balance.time_model import Line
from evener.errors import ConfigurationError
from evener.tools.estimate.traffic import Message
from evener.tools.plan.cluster import Cluster, PlannedCard, PlannedLink
from evener.tools.plan.costs import UNMEASURED_SPREAD, StepCosts
from evener.tools.plan.work import RankWork, StepWork

EFFICIENCY = 0.6
"""The part of a card's peak that products reach in training, a round figure. With the bytes that operators move it
gives large language models about 40 % of the peak, as published (Llama 3, arXiv:2407.21783: 38 to 43 %)."""
MEASURED_EFFICIENCY = 0.8
"""The same as a part of the measured speed of products of large matrices, a round figure."""
START_SECONDS = 6e-6
"""About what it takes the host to give an accelerator an operator in PyTorch's eager mode: a round figure."""
MESSAGE_START_SECONDS = 50e-6
"""About what it takes the host to start a message, with the code around it: a round figure."""
HIDDEN = 0.55
"""The part of the passes behind which sums of gradients hide: backward is two thirds, and the overlap slows it."""
HIDDEN_GATHERS = 0.8
"""The same if weights are gathered ahead as well, which hides behind forward, too."""
WHOLE = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 1.0,
    "all_to_all": 1.0,
    "send": 1.0,
}
"""How many times each rank sends all other ranks' parts of a tensor."""


def costs_of_work(work: StepWork, cluster: Cluster, dtype: str, efficiency: float | None = None) -> StepCosts:
    """Returns the costs of a step on the first ranks of a cluster.

    Args:
        dtype: The type in which products are computed, by its name in torch.
        efficiency: The part of the peak that passes reach. None for the usual one.

    Raises:
        ConfigurationError: If a card cannot compute in this type, as far as is known.
    """
    layout, stages, data = work.layout, len(work.ranks), work.layout.data_axis(0)
    # Ranks that share a part of the batch are next to each other in the costs.
    order = range(layout.world_size) if data.is_whole else [rank for team in data.teams for rank in team]
    cards = [cluster.ranks[rank][1] for rank in order]
    own = [work.ranks[layout.place(rank)["pipeline"] if stages > 1 else 0] for rank in order]
    pairs = [(id(each), id(card)) for each, card in zip(own, cards, strict=True)]
    different = {pair: (each, card) for pair, each, card in zip(pairs, own, cards, strict=True)}
    passes = {pair: _passes(*each, dtype, efficiency) for pair, each in different.items()}
    slowest, team = max(work.ranks, key=lambda each: each.flops), set(data.team)
    inside = [m for m in slowest.messages if len(m.ranks) <= len(team) and team.issuperset(m.ranks)]
    between = [m for m in slowest.messages if len(m.ranks) > len(team) or not team.issuperset(m.ranks)]
    times = MessageTimes(cluster)
    blocking = sum(map(times.seconds, inside))
    hideable = [*map(times.seconds, between)]
    gathers = any(each.kind == "all_gather" for each in between)
    return StepCosts(
        tuple(passes[pair] for pair in pairs),
        data.degree,
        blocking=Line(0.0, blocking / max(1, slowest.samples)),
        rest=Line(sum(hideable), 0.0),
        hidden=HIDDEN_GATHERS if gathers else HIDDEN,
        exposed=hideable[-1] if hideable else 0.0,
        update=max(update_seconds(*each) for each in different.values()),
        bubble=_bubble(work.ranks[0].messages, stages),
        spread=UNMEASURED_SPREAD,
    )


def _passes(work: RankWork, card: PlannedCard, dtype: str, efficiency: float | None) -> Line:
    """Returns the passes of a rank. On an accelerator they take at least as long as the host takes to start them."""
    seconds = work.flops / speed_of(card, dtype, efficiency) + work.moved / card.memory_bytes_per_second
    started = work.operators * START_SECONDS + len(work.messages) * MESSAGE_START_SECONDS
    started = 0.0 if card.kind == "cpu" else started
    return Line(max(0.0, started - seconds), seconds / max(1, work.samples))


def speed_of(card: PlannedCard, dtype: str, efficiency: float | None = None) -> float:
    """Returns the operations a second that passes reach on a card."""
    peak = card.flops.get(dtype)
    if peak is None:
        known = ", ".join(card.flops)
        raise ConfigurationError(
            f"nothing is known of the speed of {card.name} in {dtype}; known are {known}"
        )
    return peak * (efficiency or (MEASURED_EFFICIENCY if card.is_measured else EFFICIENCY))


def update_seconds(work: RankWork, card: PlannedCard) -> float:
    """Returns the seconds of the optimizer: it reads gradients, and reads and writes weights and its state."""
    return (3 * work.parameters + 2 * work.optimizer) / card.memory_bytes_per_second


@dataclass(frozen=True)
class _GroupPath:
    """What lies between the ranks of a group."""

    of_machine: int
    """The most ranks of a machine."""
    machines: int
    inside: PlannedLink | None
    """The slowest link within a machine; None if each machine has one rank."""
    sharing: int
    """Groups that share a machine's connection."""


class MessageTimes:
    """Predicts messages on a cluster. Looks at each group of ranks once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._routes: dict[tuple[int, ...], _GroupPath] = {}

    def seconds(self, message: Message) -> float:
        """Returns the seconds of a message, or of a collective operation."""
        if message.kind == "send":
            return _seconds(self._cluster.link(*message.ranks), message.nbytes)
        if message.ranks not in self._routes:
            self._routes[message.ranks] = self._route(message.ranks)
        route, times, found = self._routes[message.ranks], WHOLE[message.kind], 0.0
        if route.inside is not None:
            part = _seconds(route.inside, message.nbytes / route.of_machine)
            found += times * (route.of_machine - 1) * part
        if route.machines > 1:
            part = _seconds(self._cluster.between, message.nbytes * route.sharing / route.machines)
            found += times * (route.machines - 1) * part
        return found

    def _route(self, ranks: Sequence[int]) -> _GroupPath:
        at = [self._cluster.ranks[rank][0] for rank in ranks]
        numbers = Counter(at)
        most = max(numbers.values())
        links = [self._cluster.machines[place].inside for place, number in numbers.items() if number > 1]
        slowest = min(links, key=lambda link: link.bytes_per_second, default=None)
        return _GroupPath(
            most, len(numbers), slowest, max(1, len(self._cluster.machines[at[0]].cards) // most)
        )


def _seconds(link: PlannedLink, nbytes: float) -> float:
    return link.latency_seconds + nbytes / link.bytes_per_second


def _bubble(messages: Sequence[Message], stages: int) -> float:
    """Returns the idle part of a pipeline: (stages - 1) / micro-batches, each of which the first stage sends on."""
    sends = sum(message.kind == "send" for message in messages)
    return (stages - 1) / sends if stages > 1 and sends else 0.0
