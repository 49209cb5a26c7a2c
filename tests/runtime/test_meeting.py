from __future__ import annotations

import socket
import time

import pytest

from evener.errors import RankTimeoutError
from evener.runtime.meeting import Meeting
from evener.runtime.rendezvous import Rendezvous


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
        Meeting(rendezvous, 2.0).handler().next_rendezvous()
    assert time.monotonic() - began < 12
    missing = "1" if backend == "c10d" else "the other"
    assert (
        f"evener: waiting for {missing} of 2 machines at {rendezvous.endpoint} for " in capfd.readouterr().err
    )


def test_one_machine_waits_for_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    handler = Meeting(Rendezvous(), 60.0).handler()
    assert handler.next_rendezvous().world_size == 1
    handler.shutdown()
    assert capfd.readouterr().err == ""
