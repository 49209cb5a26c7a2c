"""Finds the missing ranks after a collective failed.

Gloo reports that a connection was closed or that a receive timed out, but not which rank of the group is
missing. The ranks can find out: all waiting ranks fail at about the same time, and each then signs a list in the
store. A rank that has not signed a moment later was not waiting with the others::

    rank 0  all-reduce failed ─ sign ─┐
    rank 1  (stopped)                 ├─ after the grace period: signed {0, 2}, so rank 1 is missing
    rank 2  all-reduce failed ─ sign ─┘
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import Store

from evener.distributed.restart_count import next_name
from evener.distributed.watchdog.peers import absent
from evener.distributed.watchdog.watchdog import standings
from evener.errors import EvenerError, RankError, RankTimeoutError
from evener.torch_internals.process_groups import default_store

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEPARTED = ("closed by peer", "reset by peer", "connection refused", "broken pipe")


class RollCall:
    """Names the ranks of ``group`` that did not fail together with this one.

    Args:
        group: The ranks that should sign.
        grace_seconds: The time that the other ranks have to sign.
    """

    def __init__(self, group: dist.ProcessGroup, grace_seconds: float = 3.0) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._key = next_name(f"evener/roll_call/{group.group_name}")  # all ranks make them in one order
        self._grace_seconds = grace_seconds

    def explain(self, error: RuntimeError) -> EvenerError:
        """Returns the error to raise in place of the backend's ``error``. It names the missing ranks (global numbers).
        Waits up to ``grace_seconds``."""
        who = _who(self.missing())
        if any(sign in str(error).lower() for sign in _DEPARTED):
            return RankError(
                f"an all-reduce of ranks {self._ranks} broke off: {who}; see what that rank said first. "
                f"The backend said: {error}{standings()}"
            )
        return RankTimeoutError(
            f"an all-reduce of ranks {self._ranks} ended without {who}: dead, stopped, or busy elsewhere. "
            f"The backend said: {error}{standings()}"
        )

    def missing(self) -> list[int] | None:
        """Signs, and returns the global ranks that have not signed within the grace period, or None if the store does
        not answer."""
        try:
            return self._missing(default_store())
        except (RuntimeError, ValueError):
            return None

    def _missing(self, store: Store) -> list[int]:
        store.set(self._sign(dist.get_rank()), "here")
        deadline = time.monotonic() + self._grace_seconds
        signs = {self._sign(rank): rank for rank in self._ranks}
        while not store.check(list(signs)):  # one request for all ranks
            if time.monotonic() > deadline:
                return [signs[sign] for sign in absent(store, list(signs))]
            time.sleep(0.05)
        return []

    def _sign(self, rank: int) -> str:
        return f"{self._key}/{rank}"


def _who(missing: Sequence[int] | None) -> str:
    if missing is None:
        return "a rank that cannot be named (the store of the process group is gone with it)"
    if not missing:
        return "a rank that failed at the same time as all others"
    return ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
