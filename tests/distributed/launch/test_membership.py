"""Machines that come and go, seen from launchers that are threads of one process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from evener.distributed.launch import membership
from evener.distributed.launch.membership import (
    Membership,
    check_terms,
    common_name,
    keeps_store,
    pause_seconds,
)
from evener.distributed.launch.rendezvous_state import JsonBackend
from evener.distributed.loopback import store as loopback_store
from evener.distributed.recovery.regroup import newcomers
from evener.errors import ConfigurationError


def test_each_start_doubles_the_pause_before_the_next_newcomer() -> None:
    assert [pause_seconds([0.0] * starts, 1.0) for starts in (1, 2, 3, 4)] == [5, 10, 20, 40]
    assert pause_seconds([0.0] * 30, 1.0) == 600
    assert pause_seconds([0.0, 10.0, 1000.0], 1001.0) == 5, "earlier ones are forgotten"


def test_a_machine_with_other_terms_is_refused_with_what_differs() -> None:
    store, terms = dist.HashStore(), {"setting seed": 0, "the task": "digits"}
    check_terms(store, "id", terms)
    check_terms(store, "id", dict(reversed(terms.items())))
    with pytest.raises(ConfigurationError, match="seed is 1 here and 0 there"):
        check_terms(store, "id", terms | {"setting seed": 1})
    with pytest.raises(ConfigurationError, match="setting new is 'x' here and None there"):
        check_terms(store, "id", terms | {"setting new": "x"})
    check_terms(store, "another", terms | {"setting seed": 1})


@pytest.mark.parametrize("text", ["[1]", "3", "{"])
def test_terms_of_a_stranger_are_refused(text: str) -> None:
    store = dist.HashStore()
    store.set("evener/id/terms", text)
    with pytest.raises(ConfigurationError, match="holds no terms of Evener"):
        check_terms(store, "id", {"the task": "digits"})


def test_all_machines_have_one_name_for_the_launch() -> None:
    store = dist.HashStore()
    assert common_name(store, "id") == common_name(store, "id") != common_name(store, "other")


def test_a_process_knows_that_it_keeps_the_store() -> None:
    with_server = loopback_store(0, 10, keeps=True)
    assert keeps_store(with_server)
    assert not keeps_store(dist.HashStore())


class Machine:
    """A launcher without ranks, on a store that it shares with others."""

    def __init__(self, store: Any, run_dir: Path) -> None:
        run_dir.mkdir()
        self.run_dir = run_dir
        options = {"last_call_timeout": 1, "join_timeout": 20, "local_addr": run_dir.name}
        parameters = RendezvousParameters("c10d", "nowhere:0", "id", 1, 3, **options)
        backend = JsonBackend(C10dRendezvousBackend(store, "id"), by_arrival=True)
        self.handler = create_handler(store, backend, parameters)
        self.members = Membership(self.handler, run_dir)

    def meets(self, pool: ThreadPoolExecutor) -> Future[tuple[int, int]]:
        return pool.submit(self._meet)

    def _meet(self) -> tuple[int, int]:
        self.handler._bootstrap_store_info = None
        info = self.handler.next_rendezvous()
        return info.rank, info.world_size


def awaited(look: Any, seconds: float = 15.0) -> None:
    over = threading.Event()
    for _ in range(int(seconds / 0.1)):
        if look():
            return
        over.wait(0.1)
    raise AssertionError("it did not happen")


@pytest.mark.slow
def test_a_machine_that_comes_later_waits_and_is_taken_in_behind_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one is before the first by its address, and must not become rank 0 for that."""
    monkeypatch.setattr(membership, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(membership, "_GONE_SECONDS", 0.5)
    store = loopback_store(0, 20, keeps=True)
    first = Machine(store, tmp_path / "127.0.0.1")
    # With a connection of its own: one that waits for an answer lets nobody else ask.
    later = Machine(loopback_store(store.port, 20, keeps=False), tmp_path / "127.0.0.0")
    with ThreadPoolExecutor(2) as pool:
        assert first.members.is_new
        assert first.meets(pool).result(20) == (0, 1)
        assert (first.members.is_new, first.members.has_grown, first.members.round) == (False, False, 0)
        waits = later.meets(pool)

        def told() -> bool:
            assert first.handler.num_nodes_waiting() == 0, (
                "the agent would end the ranks in the middle of a step"
            )
            return bool(newcomers(first.run_dir))

        awaited(told)
        assert newcomers(first.run_dir)[0].startswith("127.0.0.0 (pid")
        script = Membership(first.handler, first.run_dir, ranks_agree=False)
        script._starts, script._size = [0.0], 1
        assert script._restarts() == 1, "the ranks of a script know of no steps"
        first.handler.num_nodes_waiting = first.members._restarts  # type: ignore[method-assign]
        first.handler.next_rendezvous = first.members._met  # type: ignore[method-assign]
        assert not first.members.has_grown
        first.members.prove()
        again = first.meets(pool)
        assert (again.result(20), waits.result(20)) == ((0, 2), (1, 2))
        assert (first.members.has_grown, first.members.is_new, first.members.round) == (True, False, 1)
        assert (later.members.has_grown, later.members.is_new, later.members.round) == (False, True, 1)
        assert newcomers(first.run_dir) == ()
        first.members.prove()
        assert not first.members.has_grown

        assert first.handler.num_nodes_waiting() == 0
        later.members.leave()
        awaited(lambda: first.handler.num_nodes_waiting() == 1)
        assert first.meets(pool).result(20) == (0, 1)
        first.handler.shutdown()
