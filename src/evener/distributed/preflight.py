"""What all ranks must have in common before they can talk to each other at all.

Each rank takes a device by itself: a GPU where its host has one. On a host without, a rank would take the CPU and start
gloo, wait for the others, which have started NCCL, and hang until the time is up. So before there is a process group
every rank says in the store what it took, reads what the others took, and they all come to the same verdict. Different
kinds run together where all were told to: a host whose driver is broken would train on its CPU, and nobody would know::

    rank 0  cuda ─┐                     ┌─▶ verdict of (cuda, cuda, cpu)
    rank 1  cuda ─┼─▶ store ─ N values ─┼─▶ the same
    rank 2  cpu  ─┘                     └─▶ the same
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from evener.distributed.environment import MIXED, RANKS_PER_CARD
from evener.errors import ConfigurationError

_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Terms:
    """On which terms a rank joins."""

    rank: int
    host: str
    device: str
    """``cuda`` or ``cpu``."""
    meets_by: str
    """What ranks with such devices meet by."""
    asked: str | None
    """What the user asked for: a kind of device, ``mixed``, or None for what the host has."""
    evener: str
    """Version of Evener."""
    place: str = ""
    """What ranks have in common that share a host, whatever its name is."""
    card: str = ""
    """What tells a card from all others; empty where nothing does, and where ranks may share cards."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Terms:
        return cls(**json.loads(text))


def disagreement(all_terms: Sequence[Terms]) -> str | None:
    """Why these ranks cannot run together, and the way out; None if they can."""
    if are_mixed(all_terms):
        reason = _not_mixed(all_terms)
        if reason is not None:
            return reason
    cards = Counter((terms.host, terms.card) for terms in all_terms if terms.card)
    shared = [terms for terms in all_terms if cards[terms.host, terms.card] > 1]
    if shared:
        took = _listed(shared, lambda terms: terms.card)
        return (
            f"several ranks took one card: {took}; start at most one for each card, show each task a card of its own "
            f"(srun --gpus-per-task=1), or rehearse several ranks on a card with {RANKS_PER_CARD}=N"
        )
    if len({terms.evener for terms in all_terms}) > 1:
        found = _listed(all_terms, lambda terms: f"Evener {terms.evener}")
        return f"the ranks run different versions: {found}; install the same one on all hosts"
    return None


def are_mixed(all_terms: Sequence[Terms]) -> bool:
    """Whether there are ranks that cannot meet by the library of their devices."""
    return len({(terms.device, terms.meets_by) for terms in all_terms}) > 1


def _not_mixed(all_terms: Sequence[Terms]) -> str | None:
    """Why these ranks, which have different devices, cannot run together; None if they can."""
    took = _listed(all_terms, _words)
    asked = {terms.asked for terms in all_terms}
    if asked != {MIXED}:
        cause = (
            "no device was named, so each rank took what its host has"
            if None in asked
            else "only some were told to mix them"
            if MIXED in asked
            else "as they were told"
        )
        return (
            f"the ranks took different devices ({cause}): {took}; give all of them --device cpu, leave out the hosts "
            "without a GPU, or say --device mixed to all, if these hosts are to train together"
        )
    places = {(terms.host, terms.place) for terms in all_terms}
    if len({(terms.host, terms.place, terms.device, terms.meets_by) for terms in all_terms}) > len(places):
        return (
            f"ranks of one host took different devices: {took}; with --device mixed all ranks of a host have the same "
            "kind"
        )
    return None


def _words(terms: Terms) -> str:
    return terms.device if terms.device != "cuda" or terms.meets_by == "nccl" else f"cuda ({terms.meets_by})"


def agree(store: Store, mine: Terms, world_size: int, timeout_seconds: float) -> bool:
    """Waits for the terms of all ranks. A collective call.

    Returns:
        Whether their devices cannot meet by one library, and they are to run together nevertheless.

    Raises:
        ConfigurationError: On every rank alike, if they cannot run together.
        DistError: A rank did not come in time.
    """
    keys = [str(rank) for rank in range(world_size)]
    store.set(str(mine.rank), mine.to_json())
    store.wait(keys, timedelta(seconds=timeout_seconds))
    all_terms = [Terms.from_json(text) for text in store.multi_get(keys)]
    reason = disagreement(all_terms)
    if reason is not None:
        _leave_together(store, mine.rank, world_size)
        raise ConfigurationError(reason)
    return are_mixed(all_terms)


def _leave_together(store: Store, rank: int, world_size: int) -> None:
    """The store may live in rank 0, which must not end before all have read."""
    store.set(f"{rank}/read", "")
    with suppress(dist.DistError):
        store.wait([f"{rank}/read" for rank in range(world_size)], timedelta(seconds=_LEAVE_SECONDS))


def _listed(all_terms: Sequence[Terms], value: Callable[[Terms], str]) -> str:
    """``cuda on host a (rank 0, 1, 2); cpu on host b (rank 3)``."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for terms in all_terms:
        ranks.setdefault((value(terms), terms.host), []).append(str(terms.rank))
    return "; ".join(
        f"{what} on host {host} (rank {', '.join(those)})" for (what, host), those in ranks.items()
    )
