from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evener.core.message_types import sendable


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int16).view(2, 3),
        torch.zeros(0, 3, dtype=torch.uint16),
        torch.tensor(7, dtype=torch.int16),
        torch.arange(9, dtype=torch.int16)[::3][:1],
        torch.ones(4).to(torch.float8_e4m3fn),
    ],
    ids=range(5),
)
def test_what_backends_do_not_know_is_sent_as_bytes_of_the_same_memory(tensor: Tensor) -> None:
    sent = sendable(tensor)
    assert sent.dtype == torch.uint8
    assert sent.shape == (*tensor.shape, tensor.itemsize)
    assert sent.data_ptr() == tensor.data_ptr()
    assert torch.equal(sent.view(tensor.dtype).squeeze(-1).float(), tensor.float())


def test_what_they_know_is_sent_as_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        tensor = torch.zeros(3, dtype=dtype)
        assert sendable(tensor) is tensor
