"""Filesystems for tests: fsspec's memory, emptied, with faults; and a slow one of files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from evener.checkpoint.remote import files, lock

Act = Callable[..., Any]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty memory://, a cache of the test's own, and waits of hundredths of seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(files, "SECONDS", 10.0)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.5)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def content() -> dict[str, bytes]:
    """Everything that is in memory://, by path."""
    return {path.lstrip("/"): file.getvalue() for path, file in MemoryFileSystem.store.items()}


def put(path: str, value: bytes) -> None:
    MemoryFileSystem().pipe_file(path, value)


def steps(run: str = "run") -> list[int]:
    """The steps of the checkpoints of which there are lists of files."""
    places = [path.split("/") for path in content() if path.startswith(f"{run}/checkpoints/step-")]
    return sorted(int(parts[2][5:]) for parts in places if parts[3] == "sums.json")


class SlowFiles(LocalFileSystem):
    """``slow:///path``: files, of which those of tensors of the checkpoint of step 4 are never written to the end."""

    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("slow://"))

    def put_file(self, lpath: str, rpath: str, *args: Any, **known: Any) -> None:
        if "step-00000004" in rpath and rpath.endswith(".distcp"):
            with open(lpath, "rb") as source, open(self._strip_protocol(rpath), "wb") as file:
                file.write(source.read(100))
            time.sleep(1000)
        super().put_file(lpath, rpath, *args, **known)


def register() -> None:
    fsspec.register_implementation("slow", SlowFiles, clobber=True)
