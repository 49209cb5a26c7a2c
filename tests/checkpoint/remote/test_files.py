"""Reading and writing under a URL: what is there, what is not, and what never answers."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from evener.checkpoint.remote import files as room
from evener.checkpoint.remote.files import RemoteFiles
from evener.errors import ConfigurationError, StorageError
from tests import elsewhere as places


def test_sizes_are_those_of_a_run() -> None:
    for name in (
        "a",
        "checkpoints/latest",
        "checkpoints/step-00000004/rest.pt",
        "other/b",
        "checkpoints/x/c",
    ):
        places.put(f"run/{name}", b"123")
    files = RemoteFiles("memory://run")
    assert files.sizes() == {"a": 3, "checkpoints/latest": 3, "checkpoints/step-00000004/rest.pt": 3}
    assert files.sizes("checkpoints/step-00000004") == {"checkpoints/step-00000004/rest.pt": 3}
    assert RemoteFiles("memory://nothing").sizes() == {}


def test_directories_are_made_where_there_have_to_be_some(tmp_path: Path) -> None:
    files = RemoteFiles(f"file://{tmp_path}/deep/run")
    files.write("checkpoints/latest", b"x")
    assert (tmp_path / "deep/run/checkpoints/latest").read_bytes() == b"x"
    assert files.sizes() == {"checkpoints/latest": 1}


def test_a_file_is_created_once(tmp_path: Path) -> None:
    for url in ("memory://run", f"file://{tmp_path}"):
        RemoteFiles(url).create("lock", b"1")
        with pytest.raises(FileExistsError):
            RemoteFiles(url).create("lock", b"2")
        assert RemoteFiles(url).read("lock", 10) == b"1"


def test_no_more_is_read_than_was_announced(tmp_path: Path) -> None:
    places.put("run/a", b"12345")
    files = RemoteFiles("memory://run")
    with pytest.raises(StorageError, match="memory://run/a has more than 4 bytes"):
        files.read("a", 4)
    files.download("a", tmp_path / "a", 3)
    assert (tmp_path / "a").read_bytes() == b"123"
    with pytest.raises(StorageError, match="ended after 5 bytes"):
        files.download("a", tmp_path / "a", 6)
    assert (tmp_path / "a").read_bytes() == b"123"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_download_goes_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_CHUNK", 3)
    places.put("run/a", b"12345678")
    RemoteFiles("memory://run").download("a", tmp_path / "a", 8)
    assert (tmp_path / "a").read_bytes() == b"12345678"


@pytest.mark.parametrize("failures", [2, 3])
def test_what_fails_is_tried_three_times(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def cat_file(*_: Any, **__: Any) -> bytes:
        calls.append(1)
        if len(calls) <= failures:
            raise ConnectionError("gone")
        return b"x"

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    files = RemoteFiles("memory://run")
    if failures == 2:
        assert files.read("a", 1) == b"x"
    else:
        with pytest.raises(StorageError, match="memory://run/a cannot be read: gone"):
            files.read("a", 1)
    assert len(calls) == 3


def test_what_is_forbidden_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def pipe_file(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(StorageError, match="memory://run/a cannot be written: Access Denied"):
        RemoteFiles("memory://run").write("a", b"")
    assert len(calls) == 1


def test_nothing_waits_for_a_filesystem_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: over.wait(60))
    monkeypatch.setattr(room, "SECONDS", 0.05)
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"memory://run cannot be listed: no answer within 0 s"):
        RemoteFiles("memory://run").sizes()
    assert time.monotonic() - begun < 30
    over.set()


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ls(*_: Any, **__: Any) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(StorageError, match="the network is gone"):
        RemoteFiles("memory://run").sizes()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere:.* cannot be opened"):
        RemoteFiles("nowhere://bucket/run")
    broken = {"class": "nothing_here.Files", "err": "Install nothing_here to access x"}
    monkeypatch.setitem(known_implementations, "lacking", broken)
    with pytest.raises(ConfigurationError, match=r"lacking://b/run needs a package .*Install nothing_here"):
        RemoteFiles("lacking://b/run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigurationError, match="Evener's extra `elsewhere` installs fsspec"):
        RemoteFiles("memory://run")
