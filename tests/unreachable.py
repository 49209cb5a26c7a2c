"""Two programs: a run on one machine, and a stranger on another who knocks at each port on which the run listens.

``python -m tests.unreachable run PLACE`` and ``python -m tests.unreachable knock PLACE``, where both see the directory.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import psutil

from evener.distributed.launch.launch import launch
from evener.distributed.session import Session
from evener.files import write_json

PATIENCE_SECONDS = 40.0


def awaited(path: Path) -> Path:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path


def work(place: Path) -> None:
    """Says on which ports this run listens, and lives until the stranger has knocked."""
    with Session(device="cpu") as session:
        own = [psutil.Process(pid).net_connections("inet") for pid in (os.getpid(), os.getppid())]
        ports = [each.laddr.port for found in own for each in found if each.status == psutil.CONN_LISTEN]
        found = sorted({port for ports in session.control.gather_objects(ports) for port in ports})
        if session.rank == 0:
            write_json(place / "ports", found)
            awaited(place / "knocked")
        session.control.barrier()


def opens(port: int) -> bool:
    try:
        with socket.create_connection(("host0", port), timeout=5):
            return True
    except OSError:
        return False


def main(part: str, place: Path) -> None:
    """The part of one of the two."""
    if part == "run":
        with socket.create_server(("", 0)) as server:  # one that is to be reached, or nothing is shown
            write_json(place / "open", server.getsockname()[1])
            launch(work, place, processes=2, device="cpu")
    else:
        ports = json.loads(awaited(place / "ports").read_text())
        known = json.loads((place / "open").read_text())
        opened = [port for port in ports if opens(port)]
        print(json.dumps({"ports": len(ports), "opened": opened, "known": known}))
        (place / "knocked").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
