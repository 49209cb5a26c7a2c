"""The machines of a run whose number may change (``--nnodes MIN:MAX``), as one launcher sees them.

torchrun's agent ends all ranks as soon as another machine waits for the next round of the rendezvous. Here the ranks
are told, agree on a step, save and end by themselves (:mod:`evener.distributed.recovery.regroup`). Only if a machine of
the current round is gone, the agent ends the ranks that are left, because they wait for it in vain.

::

    launcher 0   round 0 ── somebody waits: the file `newcomers` ── ranks end ─┐
    launcher 1              enters the wait list ──────────────────────────────┴▶ round 1

A machine that comes again and again cannot keep the run from training: each round within ten minutes doubles the time
until the next newcomer is admitted.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from evener.distributed.recovery.regroup import is_noted, tell_newcomers
from evener.errors import ConfigurationError
from evener.files import parsed
from evener.torch_internals.elastic import leave, members, participants, round_of, waiting

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 600.0
_RECENT_SECONDS = 600.0
_GONE_SECONDS = 5.0
"""Time that the ranks of this machine get to end by themselves when another machine has left the round."""
_LEAVE_SECONDS = 10.0


def pause_seconds(starts: Sequence[float], now: float) -> float:
    """Returns how long to wait, from the last start on, before other machines are admitted.

    Args:
        starts: Times of all starts so far.
    """
    recent = sum(now - start < _RECENT_SECONDS for start in starts)
    return min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2.0 ** max(0, recent - 1))


class Membership:
    """Keeps track of the machines of the run, and decides when the ranks of this one are to be started again.

    Args:
        handler: The rendezvous. Its count of waiting machines, on which the agent acts, is replaced.
        run_dir: The directory that the launcher shares with its ranks.
        ranks_agree: Whether the ranks can be told. Otherwise the agent ends them when another machine waits.
    """

    def __init__(self, handler: DynamicRendezvousHandler, run_dir: Path, ranks_agree: bool = True) -> None:
        self._handler, self._run_dir, self._ranks_agree = handler, run_dir, ranks_agree
        self._look, self._meet = handler.num_nodes_waiting, handler.next_rendezvous
        self._starts: list[float] = []
        self._size, self._lost_at = 0, 0.0
        self.is_new = True
        """True until this launcher has taken part in a round that the others did not begin before it."""
        self._now: frozenset[str] = frozenset()
        self._proven: frozenset[str] = frozenset()
        handler.num_nodes_waiting = self._restarts  # type: ignore[method-assign]
        handler.next_rendezvous = self._met  # type: ignore[method-assign]

    @property
    def round(self) -> int:
        return round_of(self._handler)

    @property
    def has_grown(self) -> bool:
        """True if machines take part in the current round with which the others have not taken a step yet."""
        return bool(self._proven) and not self._now <= self._proven

    def prove(self) -> None:
        """Tells that the machines of the current round have taken a step together."""
        self._proven |= self._now

    def _met(self) -> Any:
        tell_newcomers(self._run_dir, ())
        info = self._meet()
        self._size, self._now = info.world_size, members(self._handler)
        self.is_new = not self._starts and self.round > 0
        self._lost_at = 0.0
        self._starts.append(time.monotonic())
        return info

    def _restarts(self) -> int:
        """Returns a number above 0 if the agent is to end its ranks and meet the others anew. Called about ten times a
        second; the handler asks the store once a second."""
        self._look()
        now, lost = time.monotonic(), self._size - (participants(self._handler) or 0)
        if lost > 0:
            self._lost_at = self._lost_at or now
            waits = now - self._lost_at < _GONE_SECONDS or is_noted(self._run_dir, self.round)
            return 0 if waits else lost
        names = waiting(self._handler)
        if names and now - self._starts[-1] < pause_seconds(self._starts, now):
            return 0
        if not self._ranks_agree:
            return len(names)
        tell_newcomers(self._run_dir, names)
        return 0

    def leave(self) -> None:
        """Leaves the rendezvous, which stays open for the others."""
        with suppress(RendezvousError):
            leave(self._handler, _LEAVE_SECONDS)


def keeps_store(store: Any) -> bool:
    """Returns True if this process hosts the store."""
    with suppress(psutil.Error, AttributeError):
        found = psutil.Process().net_connections(kind="tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == store.port for each in found)
    return False


def common_name(store: Store, run_id: str) -> str:
    """Returns a name for the launch of the run, the same on all machines and unlike that of any other run."""
    found: bytes = store.compare_set(f"evener/{run_id}/launch", "", f"{run_id}-{secrets.token_hex(8)}")
    return found.decode()


def check_terms(store: Store, run_id: str, terms: Mapping[str, Any]) -> None:
    """Compares what this machine is to run with what the first one does, before it joins.

    Raises:
        ConfigurationError: If they differ. The run does not notice.
    """
    text = json.dumps(terms, sort_keys=True, default=str)
    found: bytes = store.compare_set(f"evener/{run_id}/terms", "", text)
    try:
        own, first = parsed(text), dict(parsed(found.decode()))
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"the store of the run {run_id!r} holds no terms of Evener: {error}"
        ) from error
    differences = [
        f"{name} is {own.get(name)!r} here and {first.get(name)!r} there"
        for name in sorted(own.keys() | first.keys())
        if own.get(name) != first.get(name)
    ]
    if differences:
        raise ConfigurationError(
            f"this machine cannot join the run {run_id!r}: {'; '.join(differences)}. The run goes on without it"
        )
