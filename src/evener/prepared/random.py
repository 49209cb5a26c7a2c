"""Random numbers that all ranks draw alike, as one device would draw them.

What decides which samples come is torch's default generator, from which a shuffling sampler takes its seed. On ranks
the model draws from it too, for other samples on each, so that after a step no two would shuffle alike. So there are
two: the one that all ranks hold in common is put in the place of the default while an order is drawn, and the
default is each rank's own again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_APART = 1 << 32


class CommonRandom:
    """The generator that ranks have in common.

    Args:
        state: Of torch's default generator, the same on all ranks.
        is_alone: Whether there is one rank, whose default generator it is.
    """

    def __init__(self, state: Tensor, is_alone: bool) -> None:
        self.state = state
        self._is_alone = is_alone

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """What is drawn inside from the default generator is the same on all ranks."""
        if self._is_alone:
            yield
            return
        own = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(own)

    def held(self) -> Tensor:
        """The state now."""
        return torch.get_rng_state() if self._is_alone else self.state

    def take(self, state: Tensor) -> None:
        """Goes on from a state that :meth:`held` gave."""
        if self._is_alone:
            torch.set_rng_state(state)
        self.state = state


def apart(seed: int, rank: int) -> torch.Generator:
    """A generator for a rank's workers, whose random numbers are for its own samples."""
    return torch.Generator().manual_seed((seed + _APART * rank) % 2**63)
