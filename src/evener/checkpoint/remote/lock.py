"""Keeps two runs from writing under the same URL: a small file that its run renews, and removes at its end.

Whoever finds the file waits until it changes, and is refused then, or until it has not changed for a while, and takes
it over: its run has been killed. No clock of another host is compared. The lock of a dead process on this host is taken
over at once.

A run that was cut off from the network for that long finds that its lock is another's, and uploads nothing more.
Between two looks at the lock it may still do so: filesystems have nothing that could prevent it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import psutil

from evener.checkpoint.remote.files import RemoteFiles
from evener.core.text import printable, shortened
from evener.distributed.hosts import host_token
from evener.errors import ConfigurationError, StorageError
from evener.files import parsed

LOCK = ".evener-lock"
BEAT_SECONDS = 15.0
"""Seconds between two renewals."""
PATIENCE_SECONDS = 60.0
"""A lock that has not changed for so long is taken over."""
_LONGEST, _READS = 10_000, 5


class RemoteLock:
    """Held by one process from ``__enter__`` to ``__exit__``.

    Args:
        say: Called with a message while it waits for another's lock, and when it takes one over.

    Raises:
        ConfigurationError: When entered, if a run holds it.
        StorageError: When entered, if it cannot be written.
    """

    def __init__(self, files: RemoteFiles, say: Callable[[str], object]) -> None:
        self._files, self._say = files, say
        self._token, self._beats = uuid.uuid4().hex, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="evener-remote-lock", daemon=True)

    def __enter__(self) -> RemoteLock:
        try:
            self._files.create(LOCK, self._content())
        except FileExistsError:
            self._take_over()
        self.check()
        self._thread.start()
        return self

    def _take_over(self) -> None:
        """Returns when the lock of a run that is dead has become this one's."""
        found, since = self._holder(), time.monotonic()
        if found.get("token") == self._token:  # created by a try that seemed to fail
            return
        label = self._label(found)
        here = found.get("machine") == host_token() and type(found.get("pid")) is int
        if found and not (here and not psutil.pid_exists(found["pid"])):
            self._say(
                f"{self._files.url} is locked ({label}): waiting up to {PATIENCE_SECONDS:.0f} s for a sign of it"
            )
            while time.monotonic() - since < PATIENCE_SECONDS:
                time.sleep(min(1.0, PATIENCE_SECONDS / 10))
                now = self._holder()
                if not now:
                    break
                if now != found:
                    raise ConfigurationError(
                        f"another run writes to {self._files.url} ({self._label(now)}): name another directory with "
                        "--run-dir, or wait for its end. The lock of a run that has died is taken over "
                        f"{PATIENCE_SECONDS:.0f} s after its last sign; to do so at once, remove "
                        f"{self._files.url}/{LOCK}"
                    )
        if found:
            self._say(f"the lock of {self._files.url} is taken over from a run that has died ({label})")
        self._files.write(LOCK, self._content())
        # Another may take it over in the same moment: the last has it.
        time.sleep(min(1.0, PATIENCE_SECONDS / 10))

    def _holder(self) -> dict[str, Any]:
        """Returns the content of the lock; empty if there is none."""
        for _ in range(_READS):
            try:
                found = parsed(self._files.read(LOCK, _LONGEST).decode())
                if isinstance(found, dict) and isinstance(found.get("token"), str):
                    return found
            except FileNotFoundError:
                return {}
            except ValueError:  # it may be just being renewed, which is not atomic everywhere
                time.sleep(0.1)
        raise ConfigurationError(
            f"{self._files.url}/{LOCK} is no lock of Evener: move it away, or name another directory"
        )

    @staticmethod
    def _label(found: dict[str, Any]) -> str:
        text = f"process {found.get('pid')} on {found.get('host')}, last renewed at {found.get('time')}"
        return printable(shortened(text, 300))

    def _content(self) -> bytes:
        own = {"host": socket.gethostname(), "machine": host_token(), "pid": os.getpid()}
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return json.dumps({**own, "time": at, "token": self._token, "beats": self._beats}).encode()

    def check(self) -> None:
        """Raises:
        StorageError: If the lock is another run's, or was removed.
        """
        try:
            found = self._holder()
        except ConfigurationError as error:
            raise StorageError(str(error)) from None
        if found.get("token") != self._token:
            other = f"by another run ({self._label(found)})" if found else "away"
            raise StorageError(
                f"the lock of {self._files.url} was taken {other}: nothing more is uploaded there"
            )

    def _renew(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(StorageError, ConfigurationError):  # try again at the next beat
                if self._holder().get("token") != self._token:
                    return
                self._beats += 1
                self._files.write(LOCK, self._content())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(BEAT_SECONDS)
        with suppress(StorageError, ConfigurationError):  # else others wait, and take it over
            if self._holder().get("token") == self._token:
                self._files.remove([LOCK])
