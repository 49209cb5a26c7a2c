"""Random numbers for ranks that compute the same samples and hold different features.

Between divided layers each rank draws one number for each of its own features. If it drew them from the generator that
all ranks share, the ranks' generators would differ ever after, also where all must draw the same. So each rank draws
them from a state of its own, and all take one number from the common generator as its seed::

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
    """Draws a number from the CPU generator, whose state is the same on all ranks."""
    return int(torch.randint(2**62, (), device="cpu"))


@contextmanager
def drawing_apart(index: int, device: torch.device) -> Iterator[None]:
    """Context in which this rank draws numbers of its own. It advances the common generator by one number.

    All ranks of the group must enter it, so that the common generators stay equal.

    Args:
        index: The index of this rank among those that draw different numbers.
        device: The device on which numbers are drawn.
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
    """``nn.Dropout`` for this rank's features."""


class _Dropout1d(_Apart, nn.Dropout1d):
    """``nn.Dropout1d`` for this rank's channels."""


class _Dropout2d(_Apart, nn.Dropout2d):
    """``nn.Dropout2d`` for this rank's channels."""


class _Dropout3d(_Apart, nn.Dropout3d):
    """``nn.Dropout3d`` for this rank's channels."""


APART: dict[type[nn.Module], type[_Apart]] = {
    nn.Dropout: _Dropout,
    nn.Dropout1d: _Dropout1d,
    nn.Dropout2d: _Dropout2d,
    nn.Dropout3d: _Dropout3d,
}


def draw_apart(dropout: nn.Module, index: int) -> None:
    """Makes a dropout of ``torch.nn`` draw this rank's own numbers, for its features; changes it in place."""
    dropout.__class__ = APART[type(dropout)]
    assert isinstance(dropout, _Apart)
    dropout.index = index
