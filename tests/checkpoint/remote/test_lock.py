"""One run at a time writes under a URL."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from evener.checkpoint.remote.files import RemoteFiles
from evener.checkpoint.remote.lock import LOCK, RemoteLock
from evener.distributed.hosts import host_token
from evener.errors import ConfigurationError, StorageError
from tests import elsewhere as places


def lock(said: list[str] | None = None) -> RemoteLock:
    return RemoteLock(RemoteFiles("memory://run"), (said if said is not None else []).append)


def left_by(**known: Any) -> None:
    """A lock that nobody renews."""
    entries = {"host": "far", "machine": "other", "pid": 7, "time": "then", "token": "t", "beats": 0} | known
    places.put(f"run/{LOCK}", json.dumps(entries).encode())


def test_a_run_that_lives_keeps_others_out() -> None:
    with lock():
        with pytest.raises(
            ConfigurationError, match=r"another run writes to memory://run \(process \d+ on .*, last renewed"
        ):
            lock().__enter__()
        assert LOCK in "".join(places.content())
    assert not places.content()
    with lock():
        pass


def test_the_lock_of_a_run_on_another_host_is_taken_over_when_it_is_not_renewed() -> None:
    left_by()
    said: list[str] = []
    with lock(said) as held:
        held.check()
        assert json.loads(places.content()[f"run/{LOCK}"])["token"] != "t"
    assert "waiting" in said[0]
    assert "taken over from a run that has died (process 7 on far" in said[1]


def test_the_lock_of_a_dead_process_on_this_host_is_taken_over_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evener.checkpoint.remote.lock.PATIENCE_SECONDS", 0.0001)
    left_by(machine=host_token(), pid=2**22 + 1)
    said: list[str] = []
    with lock(said):
        assert [text for text in said if "waiting" in text] == []
    assert len(said) == 1


def test_a_lock_that_is_removed_meanwhile_is_free() -> None:
    left_by()
    own = lock()
    own._say = lambda text: RemoteFiles("memory://run").remove([LOCK])
    with own:
        own.check()


def lost(held: RemoteLock, lose: Callable[[], object]) -> None:
    """Loses the lock until its run has seen it: a renewal that had read it before would write it again."""
    deadline = time.monotonic() + 30
    while held._thread.is_alive():
        assert time.monotonic() < deadline, "renewals go on"
        lose()
        time.sleep(0.05)


def test_whoever_loses_the_lock_uploads_nothing_more_and_leaves_the_other_one() -> None:
    with lock() as held:
        lost(held, left_by)
        with pytest.raises(StorageError, match=r"was taken by another run .process 7 on far"):
            held.check()
    assert json.loads(places.content()[f"run/{LOCK}"])["token"] == "t"
    RemoteFiles("memory://run").remove([LOCK])
    with lock() as held:
        lost(held, lambda: RemoteFiles("memory://run").remove([LOCK]))
        with pytest.raises(StorageError, match="was taken away"):
            held.check()


@pytest.mark.parametrize("value", [b"", b"[1]", b'{"token": 1}', b"\xff"])
def test_another_programs_file_is_left(value: bytes) -> None:
    places.put(f"run/{LOCK}", value)
    with pytest.raises(ConfigurationError, match="is no lock of Evener"):
        lock().__enter__()
    assert places.content()[f"run/{LOCK}"] == value
