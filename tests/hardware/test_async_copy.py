from __future__ import annotations

import pytest
import torch

from evener.hardware.async_copy import SENDERS, copy_tensor, move_tensor, send
from tests.waiting_copies import CPU, DEVICE, CopiesToHost


def test_what_is_there_already_stays() -> None:
    samples = torch.arange(3)
    assert send(samples, torch.device("cpu")) is samples


def test_a_kind_of_device_is_sent_to_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert send(torch.arange(3), torch.device("meta")).is_meta
    monkeypatch.setitem(SENDERS, "meta", lambda tensor, device: tensor + 1)
    assert send(torch.arange(3), torch.device("meta")).tolist() == [1, 2, 3]


def test_the_host_waits_for_what_comes_to_it_and_for_nothing_else() -> None:
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    with CopiesToHost() as copies:
        assert move_tensor(there, CPU).device == CPU
        copy_tensor(here, there)
    assert copies.waits == [True, True]
    assert move_tensor(here, DEVICE).is_meta
    copy_tensor(there, here)


@pytest.mark.gpu
def test_numbers_of_a_gpu_are_there_when_the_host_has_them() -> None:
    matrix = torch.rand(4096, 4096, device="cuda")
    for _ in range(50):
        matrix = (matrix @ matrix).clamp(0, 1)
    filled, kept = matrix * 0 + 7, torch.zeros(4096, 4096)
    copy_tensor(kept, filled)
    assert kept.eq(7).all()
    assert move_tensor(filled, CPU).eq(7).all()


@pytest.mark.gpu
def test_the_host_goes_on_before_a_gpu_has_come_so_far() -> None:
    matrix = torch.rand(4096, 4096, device="cuda")
    for _ in range(50):
        matrix = matrix @ matrix
    busy = torch.cuda.current_stream().record_event()
    sent = send(torch.arange(1000), torch.device("cuda"))
    assert not busy.query()
    assert sent.tolist() == list(range(1000))
