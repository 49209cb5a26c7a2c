"""The buffers of a model before a step, so that a step that is left out or repeated leaves no trace in them."""

from __future__ import annotations

import torch
from torch import nn

from evener.torch_internals.modules import own_buffers


class BufferSnapshot:
    """Copies of all buffers.

    Args:
        model: The model. None makes a snapshot of nothing.
        step: The number of the step that follows.
    """

    def __init__(self, model: nn.Module | None = None, step: int | None = None) -> None:
        self.step = step
        self._kept = [
            (held, name, buffer, buffer.clone())
            for held in (map(own_buffers, model.modules()) if model is not None else ())
            for name, buffer in held.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers the values of the snapshot. They are the same tensors as before."""
        for held, name, buffer, value in self._kept:
            held[name] = buffer.copy_(value)
