"""Keeps the communication of ranks on one machine on the loopback interface, out of reach from the network.

PyTorch's store listens on all addresses of a machine, gloo and NCCL on the first that they find. None of them
authenticates its clients. Runs on several machines need these open ports, runs on one machine do not. Other users of
the machine can still reach its loopback.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

ADDRESS = "127.0.0.1"
_NAMES = ("lo", "lo0")
"""Names of the loopback interface on Linux and macOS."""


def store(port: int, timeout_seconds: float, keeps: bool) -> TCPStore:
    """Opens a TCPStore on the loopback interface.

    Args:
        port: Port of the store; 0 is any free port.
        timeout_seconds: Timeout of the store.
        keeps: True if this process hosts the store, False if it connects to it.

    Raises:
        OSError: If the port is taken.
        torch.distributed.DistError: If the store cannot be reached in time.
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
    """Returns the environment variables that keep gloo and NCCL on the loopback, except those that the user has set."""
    name = next((name for _, name in socket.if_nameindex() if name in _NAMES), None)
    wanted = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {key: value for key, value in wanted.items() if key not in os.environ}


class OneMachine(RendezvousHandler):
    """Rendezvous of a single machine for torchrun's agent: needs no negotiation and unpickles nothing."""

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
