"""Freed memory is kept in a session, and returned after it."""

from __future__ import annotations

import platform
from collections.abc import Callable

import psutil
import pytest
import torch

from evener.hardware.memory.malloc import freed_memory_kept, kept_nbytes
from tests.distributed.processes import call

MB = 2**20
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def _held() -> int:
    return psutil.Process().memory_info().rss


def _faults_of(steps: Callable[[], object]) -> int:
    """Returns the pages that the system had to map meanwhile."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _steps() -> None:
    for _ in range(20):
        torch.ones(10 * MB)  # 40 MB


def _faults() -> tuple[int, int, int]:
    """Returns the pages mapped in steps without, within and the bytes that were given back after."""
    without = _faults_of(_steps)
    with freed_memory_kept():
        _steps()
        within = _faults_of(_steps)
        kept = _held()
    return without, within, kept - _held()


@glibc
def test_blocks_of_a_step_are_mapped_once() -> None:
    without, within, returned = call(_faults)
    assert without > 100_000  # 20 times 40 MB in pages of 4 KB
    assert within < 1_000
    assert returned > 30 * MB


def _kept() -> tuple[int, int]:
    """Returns the freed memory that is known to be held while a tensor lives, and after it."""
    with freed_memory_kept():
        tensor = torch.ones(50 * MB)
        while_it_lives = kept_nbytes()
        del tensor
        return while_it_lives, kept_nbytes()


@glibc
def test_what_is_kept_is_known() -> None:
    before, after = call(_kept)
    assert after - before == pytest.approx(200 * MB, rel=0.1)


@glibc
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_the_user_has_chosen_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1", "LD_PRELOAD": "libjemalloc.so"}
    monkeypatch.setenv(name, value.get(name, "1"))
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("changed"))
    with freed_memory_kept():
        pass
