"""Buffers of a model that a forward pass may write and nothing keeps equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
            (module, name, f"{prefix}.{name}".lstrip("."))
            for prefix, module in model.named_modules()
            if not (isinstance(module, BatchNorm) and module.is_exact and is_whole)
            for name, buffer in own_buffers(module).items()
            if isinstance(buffer, Tensor)
        ]

    def tensors(self) -> list[Tensor]:
        """Returns the buffers as they are now: a forward pass may have put another tensor in the place of one, and the
        loop may have taken one out, as the mask of a pruned layer."""
        found = [own_buffers(module).get(name) for module, name, _ in self._named]
        return [buffer for buffer in found if buffer is not None]

    @contextmanager
    def written(self) -> Iterator[list[str]]:
        """Yields a list that holds, after the block, the names of the buffers whose numbers it has changed."""
        names, before = list[str](), [self._copy(module, name) for module, name, _ in self._named]
        yield names
        for (module, name, full), old in zip(self._named, before, strict=True):
            now = own_buffers(module).get(name)
            if old is not None and now is not None and now.shape == old.shape and not torch.equal(now, old):
                names.append(full)

    def _copy(self, module: nn.Module, name: str) -> Tensor | None:
        held = own_buffers(module).get(name)
        return None if held is None else held.clone()

    def versions(self) -> list[tuple[int, int]]:
        """Returns numbers that differ after a forward pass that wrote to a loose buffer."""
        return [(id(buffer), version(buffer)) for buffer in self.tensors()] if self._named else []
