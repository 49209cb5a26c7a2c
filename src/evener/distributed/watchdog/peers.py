"""Exchanges heartbeats and stacks between the watchdogs of all ranks, through a store.

Every rank writes its heartbeat to the store. Of all waiting ranks only one reads them (`should_look`), so that N ranks
make about N requests a second and not N squared. A rank also asks there for the stacks of another host's ranks: the
first watchdog of that host that finds the question answers it, also for a rank whose main thread holds the GIL.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from torch.distributed import PrefixStore, Store

from evener.core.stacks import stacks_of
from evener.distributed.hosts import host_token
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import PeerState, should_look
from evener.distributed.watchdog.store_timeout import Limited, LimitedStore

_LOOKER = "looker"
_ANSWER_SECONDS = 3.0
_STACKS = 4
"""Most stacks in a report."""


class PeerStates:
    """State of all other ranks.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: The store that all ranks share. It is cloned, so that a wait of the main thread on its client does not
            block the heartbeat.
        prefix: Prefix of this run's keys in the store.
    """

    def __init__(self, rank: int, world_size: int, store: Store, prefix: str) -> None:
        self.standings = {r: PeerState(r) for r in range(world_size) if r != rank}
        self.looker = PeerState(-1)
        self._rank, self._origin, self._prefix = rank, store, prefix
        self._limited = Limited(_ANSWER_SECONDS)
        self._lock = threading.Lock()
        self._answered = b""
        self.store = LimitedStore(self._clone(), self._limited)

    def _clone(self) -> Store:
        return PrefixStore(self._prefix, self._origin.clone())  # type: ignore[attr-defined]

    def reconnect(self) -> None:
        """Opens a new connection to the store after the old one broke.

        Raises:
            RuntimeError, OSError: If the store does not exist any more, or does not answer in time.
        """
        # If nobody listens any more, torch tries for minutes to connect.
        self.store = LimitedStore(self._limited.call(self._clone), self._limited)

    def close(self) -> None:
        """Stops the thread that makes the requests."""
        self._limited.close()

    @property
    def others(self) -> Collection[PeerState]:
        return self.standings.values()

    def publish(self, beat: Heartbeat) -> None:
        """Writes a heartbeat of this rank to the store."""
        if self.standings:
            self.store.set(str(self._rank), beat.to_json())

    def refresh(self) -> None:
        """Reads the latest heartbeats of all other ranks."""
        with self._lock:
            unheard = [str(standing.rank) for standing in self.others if standing.beat is None]
            silent = set(absent(self.store, unheard))
            known = [rank for rank in self.standings if str(rank) not in silent]
            texts = self.store.multi_get([str(rank) for rank in known]) if known else []
            for rank, text in zip(known, texts, strict=True):
                self.standings[rank].update(Heartbeat.from_json(text))

    def looks(self, beat: Heartbeat) -> bool:
        """Returns True if this rank is the one that checks all others (the looker). Then it says so in the store.

        Two ranks may become looker at once. One of them finds the other's entry a heartbeat later and stops.
        """
        if not self.standings:
            return True
        if self.store.check([_LOOKER]):
            self.looker.update(Heartbeat.from_json(self.store.get(_LOOKER)))
        looks = should_look(beat, self.looker)
        if looks:
            self.store.set(_LOOKER, beat.to_json())
        return looks

    def find_lost(self, interval_seconds: float) -> None:
        """Reads heartbeats until some rank is known to be lost, for a few heartbeats at most."""
        deadline = time.monotonic() + 4 * interval_seconds
        with suppress(RuntimeError, OSError):
            while time.monotonic() < deadline:
                self.refresh()
                if any(standing.is_lost for standing in self.others):
                    return
                time.sleep(interval_seconds / 2)

    # Stacks

    def answer(self) -> None:
        """Writes to the store the stacks of this host's ranks that a rank of another host has asked for."""
        key = f"asked/{host_token()}"
        if not self.standings or not self.store.check([key]):
            return
        question = self.store.get(key)
        if question != self._answered:
            self._answered = question
            for rank, pid in json.loads(question):
                self.store.set(f"stack/{rank}", stacks_of(pid))

    def stacks(self, standings: Iterable[PeerState]) -> dict[int, str]:
        """Returns the stacks, by rank, of up to four running ranks that do not wait, or of any if all wait.

        Unknown stacks are left out.
        """
        running = [s.beat for s in standings if s.beat is not None and s.state == "running"]
        late = [beat for beat in running if not beat.waits] or running
        shown = sorted(late, key=lambda beat: beat.rank)[:_STACKS]
        local = {beat.rank: stacks_of(beat.pid) for beat in shown if beat.token == host_token()}
        with suppress(RuntimeError, OSError):
            return local | self._remote([beat for beat in shown if beat.token != host_token()])
        return local

    def _remote(self, beats: Collection[Heartbeat]) -> dict[int, str]:
        for token in {beat.token for beat in beats}:
            asked = [(beat.rank, beat.pid) for beat in beats if beat.token == token]
            self.store.set(f"asked/{token}", json.dumps(asked))
        deadline = time.monotonic() + _ANSWER_SECONDS
        keys = {f"stack/{beat.rank}": beat.rank for beat in beats}
        missing = list(keys)
        while (missing := absent(self.store, missing)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {rank: self.store.get(key).decode() for key, rank in keys.items() if key not in missing}


def absent(store: LimitedStore | Store, keys: list[str]) -> list[str]:
    """Returns those of ``keys`` that are not set. Needs one request if all are set, otherwise bisects."""
    if not keys or store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    middle = len(keys) // 2
    return absent(store, keys[:middle]) + absent(store, keys[middle:])
