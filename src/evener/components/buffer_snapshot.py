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
        modules = model.modules() if model is not None else ()
        self._held = [(held, dict(held)) for held in map(own_buffers, modules)]
        buffers = {
            id(buffer): buffer for _, kept in self._held for buffer in kept.values() if buffer is not None
        }
        self._values = [(buffer, buffer.clone()) for buffer in buffers.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers the values of the snapshot. They are the same tensors as before, and those that were None
        are None."""
        for held, kept in self._held:
            held.update(kept)
        for buffer, value in self._values:
            buffer.copy_(value)
