"""Costs of a step on devices that are not at hand: operations over speed, and messages over links.

::

    passes     operations / (peak of the card x efficiency)
    messages   rounds x latency + bytes / bandwidth      of a ring, within machines first and then between them
    update     bytes of weights, gradients and optimizer state that it reads and writes / memory bandwidth

A sum of n bytes over the g ranks of a machine, on each of N machines, takes by the two-level ring algorithm

    2 (g - 1) (l + n / (g b))  +  2 (N - 1) (L + n s / (N B))

with latency l and bandwidth b inside and L, B between. ``s`` groups of a machine share its connection with others
(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, for the ring;
the levels are those of NCCL's documentation). A scatter of sums or a gather is half of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.balance.time_model import Line
from evener.errors import ConfigurationError
from evener.tools.estimate.traffic import Message
from evener.tools.plan.cluster import Cluster, PlannedCard, PlannedLink
from evener.tools.plan.costs import UNMEASURED_SPREAD, StepCosts
from evener.tools.plan.work import RankWork, StepWork

EFFICIENCY = 0.45
"""The part of a card's peak that training reaches: published runs of large models report 35 to 55 % (model FLOPs
utilization in the Llama 3 paper, arXiv:2407.21783: 38 to 43 %)."""
MEASURED_EFFICIENCY = 0.7
"""The same as a part of the measured speed of products of large matrices."""
START_SECONDS = 6e-6
"""About what it takes the host to give an accelerator an operator in PyTorch's eager mode: a round figure."""
HIDDEN = 0.55
"""The part of the passes behind which sums of gradients hide: backward is two thirds, and the overlap slows it."""
HIDDEN_GATHERS = 0.8
"""The same if weights are gathered ahead as well, which hides behind forward, too."""
_WHOLE = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 1.0,
    "all_to_all": 1.0,
    "send": 1.0,
}


def costs_of_work(work: StepWork, cluster: Cluster, dtype: str, efficiency: float | None = None) -> StepCosts:
    """Returns the costs of a step on the first ranks of a cluster.

    Args:
        dtype: The type in which products are computed, by its name in torch.
        efficiency: The part of the peak that passes reach. None for the usual one.

    Raises:
        ConfigurationError: If a card cannot compute in this type, as far as is known.
    """
    layout, stages = work.layout, len(work.ranks)
    cards = [card for _, card in cluster.ranks[: layout.world_size]]
    own = [work.ranks[layout.place(rank)["pipeline"] % stages] for rank in range(layout.world_size)]
    compute = tuple(_passes(each, card, dtype, efficiency) for each, card in zip(own, cards, strict=True))
    slowest = max(work.ranks, key=lambda each: each.flops)
    teams = {frozenset(team) for team in layout.data_axis(0).teams}
    inside = [m for m in slowest.messages if any(set(m.ranks) <= team for team in teams)]
    between = [m for m in slowest.messages if m not in inside]
    blocking = sum(message_seconds(each, cluster) for each in inside)
    hideable = [message_seconds(each, cluster) for each in between]
    gathers = any(each.kind == "all_gather" for each in between)
    return StepCosts(
        compute,
        layout.data_axis(0).degree,
        blocking=Line(0.0, blocking / slowest.samples),
        rest=Line(sum(hideable), 0.0),
        hidden=HIDDEN_GATHERS if gathers else HIDDEN,
        exposed=hideable[-1] if hideable else 0.0,
        update=max(update_seconds(each, card) for each, card in zip(own, cards, strict=True)),
        bubble=_bubble(work.ranks[0].messages, stages),
        spread=UNMEASURED_SPREAD,
    )


def _passes(work: RankWork, card: PlannedCard, dtype: str, efficiency: float | None) -> Line:
    """Returns the passes of a rank. On an accelerator they take at least as long as the host takes to start them."""
    seconds = work.flops / speed_of(card, dtype, efficiency)
    started = 0.0 if card.kind == "cpu" else work.operators * START_SECONDS
    return Line(max(0.0, started - seconds), seconds / work.samples)


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


def message_seconds(message: Message, cluster: Cluster) -> float:
    """Returns the seconds of a message, or of a collective operation."""
    machines = [cluster.ranks[rank][0] for rank in message.ranks]
    places = list(dict.fromkeys(machines))
    most = max(machines.count(each) for each in places)
    if message.kind == "send":
        link = cluster.link(*message.ranks)
        return link.latency_seconds + message.nbytes / link.bytes_per_second
    times, found = _WHOLE[message.kind], 0.0
    if most > 1:
        link = _slowest_inside(message.ranks, machines, cluster)
        found += times * (most - 1) * (link.latency_seconds + message.nbytes / most / link.bytes_per_second)
    if len(places) > 1:
        link, number = cluster.between, len(places)
        sharing = max(1, len(cluster.machines[places[0]].cards) // most)
        nbytes = message.nbytes * sharing / number
        found += times * (number - 1) * (link.latency_seconds + nbytes / link.bytes_per_second)
    return found


def _slowest_inside(ranks: Sequence[int], machines: Sequence[int], cluster: Cluster) -> PlannedLink:
    pairs = [
        (a, b) for a, b, at, to in zip(ranks, ranks[1:], machines, machines[1:], strict=False) if at == to
    ]
    return min((cluster.link(a, b) for a, b in pairs), key=lambda link: link.bytes_per_second)


def _bubble(messages: Sequence[Message], stages: int) -> float:
    """Returns the idle part of a pipeline: (stages - 1) / micro-batches, each of which the first stage sends on."""
    sends = sum(message.kind == "send" for message in messages)
    return (stages - 1) / sends if stages > 1 and sends else 0.0
