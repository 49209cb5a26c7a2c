"""Support for user code between divided layers, so that it computes this rank's heads or features.

Such code reads sizes and draws random numbers, as in attention::

    b, t, c = x.size()                               a stand-in for x, with as many features as this rank has
    q = self.c_attn(x).view(b, t, heads, -1)         the layer reads x itself
    y = attention(q, k, v, dropout_p=0.1)            drawn from a generator of this rank
    return self.c_proj(y.view(b, t, c))              the common generator again
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from evener.nn.rng import drawing_apart
from evener.torch_internals.compiling import outside_of_graphs


class RegionRng:
    """Lets each rank draw its own random numbers between the layer that begins a region and the layer that ends it.

    Args:
        index: The index of this rank in the tensor-parallel group.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._block: AbstractContextManager[None] | None = None

    @outside_of_graphs
    def begin(self, device: torch.device) -> None:
        """Switches to this rank's own generator state on ``device``."""
        self.end()
        self._block = drawing_apart(self._index, device)
        self._block.__enter__()

    @outside_of_graphs
    def end(self) -> None:
        """Switches back to the generator state that all ranks share. Does nothing if ``begin`` was not called."""
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionRng:
        return RegionRng(self._index)


class StandIn:
    """A forward pre-hook that replaces an argument by a tensor with as many features as this rank has.

    User code reads its size from the replacement; the layers inside read the whole argument.

    Args:
        argument: Position or name of the argument.
        features: Size of the replacement's last dimension.
        layers: The layers that read the argument; the hook sets their attribute ``whole``.
    """

    def __init__(self, argument: int | str, features: int, layers: Iterable[nn.Module]) -> None:
        self._argument, self._features, self._layers = argument, features, tuple(layers)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = list(args), dict(kwargs)
        held: Any = args if isinstance(self._argument, int) else kwargs
        whole: Tensor = held[self._argument]
        for layer in self._layers:
            layer.whole = whole
        held[self._argument] = stand_in(whole, self._features)
        return tuple(args), kwargs


def stand_in(whole: Tensor, features: int) -> Tensor:
    """Returns the first ``features`` of ``whole``, detached: a tensor of the right shape, type and device."""
    return whole.detach().narrow(-1, 0, features).contiguous()
