"""Buffers of a model that a forward pass may write and nothing keeps equal on all ranks."""

from __future__ import annotations

from torch import Tensor, nn

from evener.nn.batch_norm import BatchNorm
from evener.torch_internals.autograd import version
from evener.torch_internals.modules import own_buffers


class LooseBuffers:
    """Finds the loose buffers of ``model``.

    Args:
        is_whole: Whether each rank computes samples of its own. The buffers of an exact BatchNorm are equal then; where
            several ranks compute the same samples they may round differently.
    """

    def __init__(self, model: nn.Module, is_whole: bool) -> None:
        self._named = [
            (module, name)
            for module in model.modules()
            if not (isinstance(module, BatchNorm) and module.is_exact and is_whole)
            for name, buffer in own_buffers(module).items()
            if isinstance(buffer, Tensor)
        ]

    def tensors(self) -> list[Tensor]:
        """Returns the buffers as they are now: a forward pass may have put another tensor in the place of one."""
        found = [own_buffers(module)[name] for module, name in self._named]
        return [buffer for buffer in found if buffer is not None]

    def versions(self) -> list[tuple[int, int]]:
        """Returns numbers that differ after a forward pass that wrote to a loose buffer."""
        return [(id(buffer), version(buffer)) for buffer in self.tensors()] if self._named else []
