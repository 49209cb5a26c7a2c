"""Where ranks of one machine meet: sockets of its loopback, which nobody reaches from the network.

PyTorch's store listens on all addresses of a machine, gloo and NCCL on the one that they find first. None of them asks
who calls. Between machines that cannot be helped; ranks of one machine need none of it. Other users of the machine can
still reach its loopback.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

ADDRESS = "127.0.0.1"
_NAMES = ("lo", "lo0")
"""What Linux and macOS call the interface."""


def store(port: int, timeout_seconds: float, keeps: bool) -> TCPStore:
    """A store of ranks of this machine.

    Args:
        port: Where it is; 0 is any free port.
        keeps: Whether this process keeps it; others reach it.

    Raises:
        OSError: If the port is taken.
        torch.distributed.DistError: If it cannot be reached in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if not keeps:
        return TCPStore(ADDRESS, port, wait_for_workers=False, timeout=timeout)
    listener = socket.create_server((ADDRESS, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        ADDRESS,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def variables() -> dict[str, str]:
    """Environment variables that have gloo and NCCL stay on the loopback, without those that the user has set."""
    name = next((name for _, name in socket.if_nameindex() if name in _NAMES), None)
    wanted = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {key: value for key, value in wanted.items() if key not in os.environ}


class OneMachine(RendezvousHandler):
    """The meeting of a machine with itself, for torchrun's agent: nothing is agreed on, and nothing is unpickled."""

    def __init__(self, timeout_seconds: float) -> None:
        self._store = store(0, timeout_seconds, keeps=True)
        self._rounds = 0

    def get_backend(self) -> str:
        return "one machine"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._rounds += 1
        own = PrefixStore(f"agent/{self._rounds}", self._store)
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "one-machine"

    def shutdown(self) -> bool:
        return True
