"""Files without names: reserved when they are made, given back when nothing lies in them, told if there is no room."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from evener.components.offload import host_storage as outside
from evener.core.config.offload import Offload
from evener.errors import ConfigurationError, StorageError
from tests.components.offload.late import files

CPU = torch.device("cpu")


def test_a_room_is_kept_until_the_last_view_has_gone_and_used_again(tmp_path: Path) -> None:
    there = files(tmp_path)
    view = there.allocate(5000)[8:16].view(torch.int64)
    view.fill_(7)
    assert there.holds(view)
    assert not list(tmp_path.iterdir())  # a process that is killed leaves nothing
    other = there.allocate(5000)
    assert there.peak == 16384
    assert other.data_ptr() != view.data_ptr() - 8
    del other
    gc.collect()
    again = there.allocate(4097)
    assert there.peak == 16384
    assert view.item() == 7
    assert not there.holds(torch.zeros(3))
    del view, again


def test_what_is_closed_keeps_no_room_but_those_in_use(tmp_path: Path) -> None:
    there = files(tmp_path)
    used, free = there.allocate(4096), there.allocate(8192)
    used.fill_(3)
    del free
    there.close()
    assert used.eq(3).all()
    assert there.holds(used)
    rooms = len(there._there)
    del used
    gc.collect()
    assert (rooms, len(there._there)) == (1, 0)
    assert not there._pool._free
    assert not there._pool._returned


def test_what_rests_is_not_lost(tmp_path: Path) -> None:
    there = files(tmp_path)
    numbers = there.allocate(2**20).view(torch.int64)
    numbers.copy_(torch.arange(2**17))
    there.rest(numbers[5:9])
    assert torch.equal(numbers, torch.arange(2**17))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="reserved by writing there")
def test_the_disk_is_reserved_when_a_room_is_made(tmp_path: Path) -> None:
    free = lambda: os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize  # noqa: E731
    there, before, size = files(tmp_path), free(), 2**28
    room = there.allocate(size)
    assert before - free() > size / 2  # others write to the disk too
    del room


def test_a_disk_without_room_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(StorageError, match=r"offload: No space left on device: 8,192 bytes in .*; make room"):
        files(tmp_path).allocate(5000)


def test_where_files_cannot_be_reserved_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert not files(tmp_path).allocate(3 * 2**20 + 1).any()


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        (None, "a rank on a CPU has everything in the memory of the host already. Name a directory"),
        (Path("/nowhere"), "offload_to /nowhere is no directory: make it"),
    ],
)
def test_an_outside_that_is_none_is_refused(directory: Path | None, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        outside.outside_of(CPU, Offload.from_settings("optimizer", directory))


@pytest.mark.gpu
def test_copies_beside_a_gpu_bring_back_what_went_out() -> None:
    device = torch.device("cuda", 0)
    there = outside.outside_of(device, Offload.from_settings("activations", None))
    sent = torch.rand(2**22, device=device)
    room = there.allocate(sent.nbytes)[: sent.nbytes].view(torch.float32)
    with there.beside.lane():
        room.copy_(sent, non_blocking=True)
        back = torch.empty_like(sent)
        back.copy_(room, non_blocking=True)
        mark = there.beside.mark()
    there.beside.wait(mark)
    assert torch.equal(back, sent)
    assert room.is_pinned()
