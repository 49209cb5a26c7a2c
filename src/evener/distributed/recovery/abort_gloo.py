"""Aborts pending gloo collectives by breaking the connections between ranks.

Neither ``abort`` nor ``shutdown`` of a process group ends a pending collective of gloo that waits for a living rank.
Breaking its TCP connection does. Only connections to other ranks' processes are broken; those to the store, which the
launcher hosts, and the user's own connections stay.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import psutil

Ends = tuple[tuple[str, int], tuple[str, int]]


def sever(pids: Collection[int]) -> int:
    """Breaks this process's TCP connections to the processes ``pids`` of this host. Returns how many were broken."""
    own = {_ends(found): found.fd for found in _connections(os.getpid())}
    theirs = {ends[::-1] for pid in pids if pid != os.getpid() for ends in map(_ends, _connections(pid))}
    return sum(_break(own[ends], ends) for ends in own.keys() & theirs)


def _connections(pid: int) -> Iterable[Any]:
    with suppress(psutil.Error):
        found = psutil.Process(pid).net_connections(kind="tcp")
        return [each for each in found if each.raddr]
    return []


def _ends(connection: Any) -> Ends:
    return tuple(connection.laddr), tuple(connection.raddr)


def _break(fd: int, ends: Ends) -> bool:
    """Shuts a connection down, on a duplicated descriptor: ``fd`` may belong to another file by now.

    Returns:
        True if it was still the connection to ``ends[1]``.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as mine:
        if mine.getpeername()[:2] == ends[1]:
            mine.shutdown(socket.SHUT_RDWR)
            return True
    return False
