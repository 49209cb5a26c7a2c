"""What a rank knows of all others, and asks of them, through a store beside the training.

Every rank leaves its heartbeat there. Of all ranks that wait, one reads them (`standing.should_look`), so that N ranks
put about N requests a second on the store and not N squared. The stacks of another host's ranks are asked for there
too: whichever watchdog of that host finds the question first answers it, also for a rank that holds Python's lock.
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
from evener.distributed.watchdog.peer_state import Standing, should_look
from evener.distributed.watchdog.store_timeout import Limited, LimitedStore

_LOOKER = "looker"
_ANSWER_SECONDS = 3.0
_STACKS = 4
"""So many are shown; those of a hundred ranks that are stuck in one place say no more."""


class Roster:
    """Where all other ranks stand.

    Args:
        store: Every rank sees the same one. It is cloned, so that a wait of the main thread on its own client does
            not hold up the heartbeat.
        prefix: Of this run in the store.
    """

    def __init__(self, rank: int, world_size: int, store: Store, prefix: str) -> None:
        self.standings = {r: Standing(r) for r in range(world_size) if r != rank}
        self.looker = Standing(-1)
        self._rank, self._origin, self._prefix = rank, store, prefix
        self._limited = Limited(_ANSWER_SECONDS)
        self._lock = threading.Lock()
        self._answered = b""
        self.store = LimitedStore(self._clone(), self._limited)

    def _clone(self) -> Store:
        return PrefixStore(self._prefix, self._origin.clone())  # type: ignore[attr-defined]

    def reconnect(self) -> None:
        """A connection that broke stays broken; a new one can be made while there is a store.

        Raises:
            RuntimeError, OSError: There is none, or it does not answer in time.
        """
        # To where nobody listens any more a connection is tried for minutes.
        self.store = LimitedStore(self._limited.call(self._clone), self._limited)

    def close(self) -> None:
        """Nothing more will be asked."""
        self._limited.close()

    @property
    def others(self) -> Collection[Standing]:
        return self.standings.values()

    def publish(self, beat: Heartbeat) -> None:
        """Leaves a heartbeat of this rank, for all others."""
        if self.standings:
            self.store.set(str(self._rank), beat.to_json())

    def refresh(self) -> None:
        """Reads the last heartbeats of all others."""
        with self._lock:
            unheard = [str(standing.rank) for standing in self.others if standing.beat is None]
            silent = set(absent(self.store, unheard))
            known = [rank for rank in self.standings if str(rank) not in silent]
            texts = self.store.multi_get([str(rank) for rank in known]) if known else []
            for rank, text in zip(known, texts, strict=True):
                self.standings[rank].update(Heartbeat.from_json(text))

    def looks(self, beat: Heartbeat, interval_seconds: float) -> bool:
        """Whether it is this rank that looks after all others, of which it then leaves word for the next ones.

        Two ranks may say so at once. The one that is not to look finds the other's word a heartbeat later.
        """
        if not self.standings:
            return True
        if self.store.check([_LOOKER]):
            self.looker.update(Heartbeat.from_json(self.store.get(_LOOKER)))
        looks = should_look(beat, self.looker, interval_seconds)
        if looks:
            self.store.set(_LOOKER, beat.to_json())
        return looks

    def find_lost(self, interval_seconds: float) -> None:
        """Takes up to a few heartbeats, until it is known of some rank that nothing more is to be expected of it."""
        deadline = time.monotonic() + 4 * interval_seconds
        with suppress(RuntimeError, OSError):
            while time.monotonic() < deadline:
                self.refresh()
                if any(standing.is_lost(interval_seconds) for standing in self.others):
                    return
                time.sleep(interval_seconds / 2)

    # Stacks

    def answer(self) -> None:
        """Gives the stacks of this host's ranks that a rank of another host has asked for."""
        key = f"asked/{host_token()}"
        if not self.standings or not self.store.check([key]):
            return
        question = self.store.get(key)
        if question != self._answered:
            self._answered = question
            for rank, pid in json.loads(question):
                self.store.set(f"stack/{rank}", stacks_of(pid))

    def stacks(self, standings: Iterable[Standing]) -> dict[int, str]:
        """Of the ranks that others wait for, or of all where there are none; what is not known is left out."""
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
    """Those of ``keys`` that nobody has set: one question where there are none, else by halves."""
    if not keys or store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    middle = len(keys) // 2
    return absent(store, keys[:middle]) + absent(store, keys[middle:])
