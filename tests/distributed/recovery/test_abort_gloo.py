from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from evener.distributed.recovery.abort_gloo import sever

PEER = """
import socket, sys
mine = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("here", flush=True)
print(repr(mine.recv(1)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def start_peer(server: socket.socket) -> tuple[subprocess.Popen[str], socket.socket]:
    """A process, and this one's end of its connection."""
    port = str(server.getsockname()[1])
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    peer = subprocess.Popen([sys.executable, "-c", PEER, port], **streams)  # type: ignore[call-overload]
    end, _ = server.accept()
    assert peer.stdout.readline() == "here\n"
    return peer, end


def test_only_the_connections_with_the_named_processes_end(server: socket.socket) -> None:
    (named, to_named), (other, to_other) = start_peer(server), start_peer(server)
    try:
        assert sever([named.pid, os.getpid()]) == 1
        assert named.stdout is not None
        assert named.stdout.readline() == "b''\n"
        assert to_named.recv(1) == b""
        to_other.sendall(b"x")
        assert other.stdout is not None
        assert other.stdout.readline() == "b'x'\n"
    finally:
        for process, end in ((named, to_named), (other, to_other)):
            end.close()
            process.communicate()


def test_a_process_that_is_gone_has_none() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert sever([gone.pid]) == 0
