"""Ends waits that nothing else ends: those in gloo for a rank that is alive and will never come.

Neither ``abort`` nor ``shutdown`` of a process group reaches a pending collective of gloo, but the end of its
connection does. Of a rank's connections those are broken whose other end another rank holds; that to the store, whose
other end is a launcher's, and the user's own stay.
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
    """Breaks the TCP connections of this process with ``pids``, on this host; returns how many there were."""
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
    """Through a descriptor of its own, for the number may be another file's by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as mine:
        if mine.getpeername()[:2] == ends[1]:
            mine.shutdown(socket.SHUT_RDWR)
            return True
    return False
