"""Costs of a step on devices that are not at hand: operations over speed, and messages over links.

::

    passes     operations / (peak of the card x efficiency) + bytes that operators move / memory bandwidth
    messages   evener.tools.plan.message_times
    update     bytes of weights, gradients and optimizer state that it reads and writes / memory bandwidth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evener.balance.time_model import Line
from evener.errors import ConfigurationError
from evener.tools.estimate.traffic import CONVOLUTIONS, Message
from evener.tools.plan.cluster import Cluster, PlannedCard
from evener.tools.plan.costs import UNMEASURED_SPREAD, StepCosts
from evener.tools.plan.message_times import MESSAGE_START_SECONDS, MessageTimes
from evener.tools.plan.work import RankWork, StepWork

EFFICIENCY = 0.6
"""The part of a card's peak that products reach in training, a round figure. With the bytes that operators move it
gives large language models about 40 % of the peak, as published (Llama 3, arXiv:2407.21783: 38 to 43 %)."""
MEASURED_EFFICIENCY = 0.8
"""The same as a part of the measured speed of products of large matrices, a round figure."""
START_SECONDS = 6e-6
"""About what it takes the host to give an accelerator an operator in PyTorch's eager mode: a round figure."""
HIDDEN = 0.55
"""The part of the passes behind which sums of gradients hide: backward is two thirds, and the overlap slows it."""
HIDDEN_GATHERS = 0.8
"""The same if weights are gathered ahead as well, which hides behind forward, too."""


def costs_of_work(
    work: StepWork, cluster: Cluster, precision: str | None = None, efficiency: float | None = None
) -> StepCosts:
    """Returns the costs of a step on the first ranks of a cluster.

    Args:
        precision: As ``--precision`` takes it, but not ``auto``. It says which float32 products are computed in TF32.
        efficiency: The part of the peak that passes reach. None for the usual one.

    Raises:
        ConfigurationError: If a card cannot compute in a type of the products, as far as is known.
    """
    layout, stages, data = work.layout, len(work.ranks), work.layout.data_axis(0)
    # Ranks that share a part of the batch are next to each other in the costs.
    order = range(layout.world_size) if data.is_whole else [rank for team in data.teams for rank in team]
    cards = [cluster.ranks[rank][1] for rank in order]
    own = [work.ranks[layout.place(rank)["pipeline"] if stages > 1 else 0] for rank in order]
    pairs = [(id(each), id(card)) for each, card in zip(own, cards, strict=True)]
    different = {pair: (each, card) for pair, each, card in zip(pairs, own, cards, strict=True)}
    passes = {pair: _passes(*each, precision, efficiency) for pair, each in different.items()}
    times, slowest = MessageTimes(cluster), max(work.ranks, key=_all_flops)
    inside, between = _inside_and_between(work)
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


def _inside_and_between(work: StepWork) -> tuple[list[Message], list[Message]]:
    """Returns the messages of the rank with the most work: among the ranks that compute its samples, and all others."""
    team, found = set(work.layout.data_axis(0).team), (list[Message](), list[Message]())
    for each in max(work.ranks, key=_all_flops).messages:
        found[len(each.ranks) > len(team) or not team.issuperset(each.ranks)].append(each)
    return found


def all_reduces_of(work: StepWork, costs: StepCosts, cluster: Cluster) -> dict[str, StepCosts]:
    """Returns the costs with each all-reduce that the ranks may take in place of the default, by its name. Empty if
    they sum no gradients, or only to the owners of weights."""
    sums = _inside_and_between(work)[1]
    if work.candidate.strategy == "sharded" or not any(each.kind == "all_reduce" for each in sums):
        return {}
    times, group = MessageTimes(cluster), max((each.ranks for each in sums), key=len)
    found = {}
    for name in times.other_all_reduces(group):
        each = [times.seconds(message, name) for message in sums]
        found[name] = replace(costs, rest=Line(sum(each), 0.0), exposed=each[-1])
    return found


def _all_flops(work: RankWork) -> int:
    return sum(work.flops.values())


def _passes(work: RankWork, card: PlannedCard, precision: str | None, efficiency: float | None) -> Line:
    """Returns the passes of a rank. On an accelerator they take at least as long as the host takes to start them."""
    seconds = work.moved / card.memory_bytes_per_second
    for dtype, flops in work.flops.items():
        seconds += flops / speed_of(card, computed_in(dtype, card, precision), efficiency)
    started = work.operators * START_SECONDS + len(work.messages) * MESSAGE_START_SECONDS
    started = 0.0 if card.kind == "cpu" else started
    return Line(max(0.0, started - seconds), seconds / max(1, work.samples))


def computed_in(dtype: str, card: PlannedCard, precision: str | None) -> str:
    """Returns the type of ``PlannedCard.flops`` in which a card computes products. If no precision is given, PyTorch
    computes matrices of float32 in float32, and convolutions in TF32 where a card has it."""
    if dtype not in ("float32", CONVOLUTIONS):
        return dtype
    is_tf32 = precision == "tf32" or (dtype == CONVOLUTIONS and precision != "fp32")
    return "tf32" if is_tf32 and "tf32" in card.flops else "float32"


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


def _bubble(messages: Sequence[Message], stages: int) -> float:
    """Returns the idle part of a pipeline: (stages - 1) / micro-batches, each of which the first stage sends on."""
    sends = sum(message.kind == "send" for message in messages)
    return (stages - 1) / sends if stages > 1 and sends else 0.0
