"""Checks before the process group is created that the devices and versions of all ranks fit together.

Each rank chooses its own device: a GPU if its host has one. On a host without a GPU a rank would choose the CPU and
start gloo, while the others start NCCL, and all would hang until the timeout. So every rank first writes its choice to
the store and reads those of the others, and all come to the same verdict. Different kinds of devices are accepted only
if all ranks were told ``mixed``: otherwise a host with a broken driver would train on its CPU unnoticed::

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
class JoinTerms:
    """Host, device and version of one rank, as it tells them to the others."""

    rank: int
    host: str
    device: str
    """Kind of the device, such as ``cuda`` or ``cpu``."""
    meets_by: str
    """Communication library for this kind of device."""
    asked: str | None
    """Device that the user asked for: a kind, ``mixed``, or None for the host's default."""
    evener: str
    """Version of Evener."""
    place: str = ""
    """Host token: equal for ranks that share a host."""
    card: str = ""
    """Unique id of the card; empty if it is unknown, or if ranks may share cards."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> JoinTerms:
        return cls(**json.loads(text))


def disagreement(all_terms: Sequence[JoinTerms]) -> str | None:
    """Returns why these ranks cannot run together, and what to do. Returns None if they can."""
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


def are_mixed(all_terms: Sequence[JoinTerms]) -> bool:
    """Returns True if the ranks have different kinds of devices or different communication libraries."""
    return len({(terms.device, terms.meets_by) for terms in all_terms}) > 1


def _not_mixed(all_terms: Sequence[JoinTerms]) -> str | None:
    """Returns why these ranks with different devices cannot run together. Returns None if they can."""
    took = _listed(all_terms, _description)
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


def _description(terms: JoinTerms) -> str:
    return terms.device if terms.device != "cuda" or terms.meets_by == "nccl" else f"cuda ({terms.meets_by})"


def agree(store: Store, mine: JoinTerms, world_size: int, timeout_seconds: float) -> bool:
    """Exchanges the terms of all ranks and checks them. All ranks must call this together.

    Returns:
        True if the ranks have different kinds of devices or libraries and are to run together nevertheless.

    Raises:
        ConfigurationError: On every rank, if the ranks cannot run together.
        DistError: If a rank does not write its terms in time.
    """
    keys = [str(rank) for rank in range(world_size)]
    store.set(str(mine.rank), mine.to_json())
    store.wait(keys, timedelta(seconds=timeout_seconds))
    all_terms = [JoinTerms.from_json(text) for text in store.multi_get(keys)]
    reason = disagreement(all_terms)
    if reason is not None:
        _leave_together(store, mine.rank, world_size)
        raise ConfigurationError(reason)
    return are_mixed(all_terms)


def _leave_together(store: Store, rank: int, world_size: int) -> None:
    """Waits until all ranks have read the terms: rank 0 may host the store, and must not end before."""
    store.set(f"{rank}/read", "")
    with suppress(dist.DistError):
        store.wait([f"{rank}/read" for rank in range(world_size)], timedelta(seconds=_LEAVE_SECONDS))


def _listed(all_terms: Sequence[JoinTerms], value: Callable[[JoinTerms], str]) -> str:
    """Formats a value by host and ranks: ``cuda on host a (rank 0, 1, 2); cpu on host b (rank 3)``."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for terms in all_terms:
        ranks.setdefault((value(terms), terms.host), []).append(str(terms.rank))
    return "; ".join(
        f"{what} on host {host} (rank {', '.join(those)})" for (what, host), those in ranks.items()
    )
