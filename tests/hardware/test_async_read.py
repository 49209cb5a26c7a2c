from __future__ import annotations

import math

import pytest
import torch

from evener.hardware.async_read import (
    READERS,
    AsyncCopyValue,
    DeferredValue,
    Readout,
    ReadyValue,
    is_late,
    kept,
    read,
)


def test_a_number_of_the_host_is_here() -> None:
    third = ReadyValue(1 / 3)
    assert third.value() == 1 / 3
    assert third.values() == [1 / 3]
    assert third.tensor.item() == 1 / 3, "all bits of it"


def test_a_tensor_of_the_host_is_here_itself() -> None:
    numbers = torch.tensor([[1.5, -2.0], [math.inf, 4.0]])
    assert ReadyValue(numbers).values() == [1.5, -2.0, math.inf, 4.0]
    assert ReadyValue(numbers).tensor is numbers
    assert ReadyValue(torch.tensor([7])).value() == 7.0


def test_what_is_read_has_no_history() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    readout = read(weight * 3)
    assert readout.value() == 6.0
    assert not readout.tensor.requires_grad


def test_what_is_kept_has_no_history_and_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device of streams too, where to start reading would copy it."""
    monkeypatch.setitem(READERS, "cpu", lambda numbers: pytest.fail("a copy was started"))
    weight = torch.tensor(2.0, requires_grad=True)
    readout = kept(weight * 3)
    assert readout.value() == 6.0
    assert not readout.tensor.requires_grad


def test_a_later_number_is_worked_out_once_and_not_before_it_is_asked_for() -> None:
    asked: list[float] = []

    def work_out() -> float:
        asked.append(0.1)
        return 0.1

    later = DeferredValue(work_out)
    assert not asked
    assert (later.value(), later.values(), later.tensor.item()) == (0.1, [0.1], 0.1)
    assert len(asked) == 1


def test_a_kind_of_device_is_read_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def reader(numbers: torch.Tensor) -> Readout:
        seen.append(numbers)
        return ReadyValue(5.0)

    monkeypatch.setitem(READERS, "meta", reader)
    weight = torch.empty((), device="meta", requires_grad=True)
    assert read(weight).value() == 5.0
    assert not seen[0].requires_grad
    assert read(3).value() == 3.0, "a number is nowhere"


def test_only_the_host_itself_is_not_behind_the_host() -> None:
    assert [is_late(torch.device(kind)) for kind in ("cpu", "cuda", "meta")] == [False, True, True]


@pytest.mark.gpu
def test_a_number_of_a_gpu_is_read_without_what_was_queued_after_it() -> None:
    matrix = torch.rand(4096, 4096, device="cuda")
    readout = read(matrix[0, :2])
    for _ in range(50):
        matrix = matrix @ matrix
    busy = torch.cuda.current_stream().record_event()
    assert len(readout.values()) == 2
    assert not busy.query()


@pytest.mark.gpu
def test_pinned_memory_is_used_again_once_its_readout_is_gone() -> None:
    """Never for two numbers at a time, and never that of a readout that nobody has read: the device may still write."""
    first, second = (read(torch.full((3,), number, device="cuda")) for number in (1.0, 2.0))
    assert isinstance(first, AsyncCopyValue)
    assert isinstance(second, AsyncCopyValue)
    places = first._copy.data_ptr(), second._copy.data_ptr()
    assert (first.values(), second.values()) == ([1.0] * 3, [2.0] * 3)
    del second
    third = read(torch.full((3,), 3.0, device="cuda"))
    assert isinstance(third, AsyncCopyValue)
    assert third._copy.data_ptr() == places[1]
    assert (first.values(), third.values()) == ([1.0] * 3, [3.0] * 3)
    unread = read(torch.full((3,), 4.0, device="cuda"))
    assert isinstance(unread, AsyncCopyValue)
    place, holder = unread._copy.data_ptr(), unread._copy
    del unread
    later = read(torch.full((3,), 5.0, device="cuda"))
    assert isinstance(later, AsyncCopyValue)
    assert later._copy.data_ptr() != place
    del holder
