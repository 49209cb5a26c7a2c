from __future__ import annotations

import torch
from torch import Tensor, nn

from evener.components.buffer_snapshot import BufferSnapshot


class Lazy(nn.Module):
    """Makes a buffer in its first forward pass, and puts another tensor in the place of one."""

    made: Tensor | None
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", None)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.made = x.detach().mean() if self.made is None else self.made
        self.count = self.count + 1
        return x - self.made


def test_a_step_that_is_left_out_leaves_no_trace_in_buffers() -> None:
    model = Lazy()
    count = model.count
    before = BufferSnapshot(model)
    model(torch.full((3,), torch.nan))
    before.restore()
    assert model.made is None
    assert model.count is count
    assert model.count == 0
