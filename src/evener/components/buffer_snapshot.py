"""The buffers of a model before a step, so that a step that is left out or repeated leaves no trace in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evener.torch_internals.autograd import version
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
        self._values = [(buffer, buffer.clone(), _version_of(buffer)) for buffer in buffers.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers the values of the snapshot. They are the same tensors as before, and those that were None
        are None."""
        for held, kept in self._held:
            held.update(kept)
        for buffer, value, was in self._values:
            # Autograd need not know of a value that comes again: a pass under way may have saved the buffer.
            is_as_saved = was is not None and was == _version_of(buffer)
            (buffer.data if is_as_saved else buffer).copy_(value)


def _version_of(buffer: Tensor) -> int | None:
    return None if buffer.is_inference() else version(buffer)
