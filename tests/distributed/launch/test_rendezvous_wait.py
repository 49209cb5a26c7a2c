from __future__ import annotations

import re
import socket
import time
from typing import Any

import pytest

from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.rendezvous_wait import RendezvousWait
from evener.errors import ConfigurationError, RankTimeoutError


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_machine_that_never_comes_is_waited_for_in_words_and_not_for_good(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    where = {"rdzv_endpoint": f"localhost:{port}"} if backend == "c10d" else {"master_port": port}
    rendezvous = Rendezvous(nnodes="2", rdzv_backend=backend, rdzv_id="1", **where)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(
        RankTimeoutError, match=r"did not find each other within 2 s at .*1( of |/)2 (came|clients joined)"
    ):
        RendezvousWait(rendezvous, 2.0).handler().next_rendezvous()
    assert time.monotonic() - began < 12
    missing = "1" if backend == "c10d" else "the other"
    assert (
        f"evener: waiting for {missing} of 2 machines at {rendezvous.endpoint} for " in capfd.readouterr().err
    )


def test_an_error_that_points_to_the_one_behind_it_says_that_one_s_words() -> None:
    error = RuntimeError("The connection to the C10d store has failed. See inner exception for details.")
    error.__cause__ = OSError("no address of host 'nowhere'\nframe #0: c10::Error")
    words = RendezvousWait(
        Rendezvous(nnodes="2", rdzv_backend="c10d", rdzv_endpoint="nowhere:1"), 2.0
    ).message(error)
    assert "(no address of host 'nowhere');" in words
    assert "inner exception" not in words


def test_one_machine_waits_for_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    handler = RendezvousWait(Rendezvous(), 60.0).handler()
    assert handler.next_rendezvous().world_size == 1
    handler.shutdown()
    assert capfd.readouterr().err == ""


def test_two_runs_of_one_machine_do_not_meet() -> None:
    first, second = (RendezvousWait(Rendezvous(), 60.0).handler().next_rendezvous() for _ in range(2))
    first.store.set("key", "value")
    assert not second.store.check(["key"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rdzv_endpoint": "x:y"}, "rdzv_endpoint is 'x:y'"),
        ({"rdzv_endpoint": "localhost:99999"}, "between 0 and 65536"),
        ({"rdzv_endpoint": "a b:3"}, "hostname"),
        ({"rdzv_endpoint": "localhost:1", "rdzv_conf": "store_type=abc"}, "rdzv_conf is 'store_type=abc'"),
        ({"rdzv_backend": "static", "master_port": 99999}, "rdzv_endpoint is '127.0.0.1:99999'"),
    ],
)
def test_options_with_which_nobody_can_meet_are_refused_in_words(options: dict[str, Any], named: str) -> None:
    rendezvous = Rendezvous(**{"nnodes": "2", "rdzv_backend": "c10d", **options})
    with pytest.raises(ConfigurationError, match=re.escape(named)) as refused:
        RendezvousWait(rendezvous, 5.0).handler()
    assert refused.value.exit_status == 2


def test_machines_that_are_given_no_endpoint_meet_where_torchrun_does() -> None:
    assert Rendezvous(nnodes="1:2", rdzv_backend="c10d").endpoint == "localhost:29400"


def test_a_machine_that_is_not_taken_in_hears_what_the_run_has() -> None:
    elastic = Rendezvous(nnodes="1:3", rdzv_backend="c10d", rdzv_endpoint="head:1")
    wait = RendezvousWait(elastic, 9)
    wait._came = 2
    message = wait.message(TimeoutError("late"))
    assert message.startswith(
        "the run at head:1 has not taken this machine in within 9 s (late): it has 2 machines"
    )
