"""Runs on one machine listen where nobody on the network reaches them."""

from __future__ import annotations

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from evener.distributed import loopback
from evener.distributed.environment import Environment
from evener.distributed.launch.launch import launch
from evener.distributed.launch.process_count import Headcount
from evener.distributed.loopback import OneMachine
from evener.distributed.session import Session, open_store
from tests.distributed.processes import call
from tests.tiers import ALWAYS, NIGHTLY, spread


def listening(*pids: int) -> set[str]:
    """The addresses on which processes listen."""
    found = [each for pid in pids for each in psutil.Process(pid).net_connections("inet")]
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def work() -> tuple[set[str], set[str], str | None]:
    with Session(device="cpu") as session:
        dist.all_reduce(torch.ones(1))
        session.patient_group()
        session.control.barrier()
        found = listening(os.getpid()), listening(os.getppid())
        session.control.barrier()
        return *found, os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("processes", spread([2, Headcount((2, 1))], NIGHTLY, ALWAYS), ids=["2", "1:2"])
def test_launcher_and_ranks_listen_on_the_loopback_alone(processes: int | Headcount) -> None:
    ranks = call(launch, work, processes=processes, device="cpu")
    for own, launchers, interface in ranks:
        assert own, "gloo listens on each rank"
        assert launchers, "the launcher keeps the store"
        assert own | launchers <= {"127.0.0.1", "::1"}
        assert interface == "lo"


def test_ranks_that_meet_without_a_launcher_of_ours_do_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tasks of a SLURM step on one node, whose name would be one that others reach."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    before = listening(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"world_size": 2, "local_world_size": 2, "master_addr": "node.invalid", "master_port": port}
    first = open_store(Environment(rank=0, local_rank=0, **place), 10.0)  # type: ignore[arg-type]
    second = open_store(Environment(rank=1, local_rank=1, **place), 10.0)  # type: ignore[arg-type]
    first.set("a", "b")
    assert second.get("a") == b"b"
    assert listening(os.getpid()) == before | {"127.0.0.1"}


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert loopback.variables() == {"NCCL_SOCKET_IFNAME": "=lo"}


def test_each_round_of_a_meeting_begins_with_nothing() -> None:
    """The agent starts its ranks again, and asks under the names of before."""
    handler = OneMachine(10.0)
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    first.store.set("key", "value")
    assert not second.store.check(["key"])
    assert first.bootstrap_store_info == second.bootstrap_store_info
