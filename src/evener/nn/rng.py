"""Random numbers where ranks that compute the same samples hold different features.

Between divided layers each rank draws for its own features, and as many numbers as it has of these. Ranks that drew
from their generators there would draw apart ever after, also where all must draw the same. So the part draws from a
generator of its own, and all take one number from the common one.

::

    common     ... a b │ seed │ c d ...       alike on all ranks
    rank 0             └▶ seed + 0: own features
    rank 1             └▶ seed + 1: own features
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from evener.hardware import accelerators
from evener.torch_internals.compiling import outside_of_graphs


def common_seed() -> int:
    """A number from the common generator."""
    return int(torch.randint(2**62, (), device="cpu"))


@contextmanager
def drawing_apart(index: int, device: torch.device) -> Iterator[None]:
    """What is drawn inside is this rank's own, and moves the common generator by one number on every rank.

    Args:
        index: Of this rank among those that draw different numbers.
        device: On which is drawn.
    """
    seed = common_seed() + index
    with accelerators.generators_kept(device):
        torch.default_generator.manual_seed(seed)
        accelerators.seed(device, seed)
        yield


class _Apart(nn.Module):
    index: int

    @outside_of_graphs  # its generator is not the graph's
    def forward(self, input: Tensor) -> Tensor:
        with drawing_apart(self.index, input.device) if self.training else nullcontext():
            dropped: Tensor = super().forward(input)
        return dropped


class _Dropout(_Apart, nn.Dropout):
    """``nn.Dropout`` of a part of the features."""


class _Dropout1d(_Apart, nn.Dropout1d):
    """``nn.Dropout1d`` of a part of the channels."""


class _Dropout2d(_Apart, nn.Dropout2d):
    """``nn.Dropout2d`` of a part of the channels."""


class _Dropout3d(_Apart, nn.Dropout3d):
    """``nn.Dropout3d`` of a part of the channels."""


APART: dict[type[nn.Module], type[_Apart]] = {
    nn.Dropout: _Dropout,
    nn.Dropout1d: _Dropout1d,
    nn.Dropout2d: _Dropout2d,
    nn.Dropout3d: _Dropout3d,
}


def draw_apart(dropout: nn.Module, index: int) -> None:
    """Makes one of ``torch.nn``'s dropouts draw for this rank's features; in place."""
    dropout.__class__ = APART[type(dropout)]
    assert isinstance(dropout, _Apart)
    dropout.index = index
