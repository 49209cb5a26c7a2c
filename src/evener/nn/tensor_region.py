"""What the code of the user's own between divided layers is given, so that it computes some of the heads or features.

Such code says sizes and draws random numbers, as in attention::

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


class Apart:
    """The random numbers of a region, which are this rank's own: from the layer that begins it to the one that ends it.

    Args:
        index: Of this rank.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._block: AbstractContextManager[None] | None = None

    @outside_of_graphs
    def begin(self, device: torch.device) -> None:
        """Draws apart from now on."""
        self.end()
        self._block = drawing_apart(self._index, device)
        self._block.__enter__()

    @outside_of_graphs
    def end(self) -> None:
        """Draws from the common generator again."""
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Apart:
        return Apart(self._index)


class StandIn:
    """A hook before the forward of a module: an argument is as wide as what this rank has of it, and layers inside read
    the whole.

    Args:
        argument: Its place or name.
        features: How many of the last dimension there are.
        layers: Those that read it, with an attribute ``whole``.
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
    """Of the form that ``whole`` would have with so many features."""
    return whole.detach().narrow(-1, 0, features).contiguous()
