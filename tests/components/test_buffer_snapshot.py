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


def test_a_pass_under_way_goes_backward_after_a_trial_of_the_model() -> None:
    """Also if the trial wrote to a buffer in a way that autograd does not see."""
    model, scale, inputs = nn.Module(), torch.full((3,), 2.0), torch.ones(3, requires_grad=True)
    model.register_buffer("scale", scale)
    outputs = inputs * scale
    before = BufferSnapshot(model)
    scale.data.add_(1)
    before.restore()
    outputs.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [2.0, 2.0, 2.0]
