"""Random numbers that all ranks draw alike, as one device would draw them.

What decides which samples come is torch's default generator, from which a shuffling sampler takes its seed. On ranks
the model draws from it too, for other samples on each, so that after a step no two would shuffle alike. So there are
two: the one that all ranks hold in common is put in the place of the default while an order is drawn, and the
default is each rank's own again. That is so of one rank, too: its order is that of any number of ranks, and no layer
that draws moves it.

Until the first order is drawn, and again from ``torch.manual_seed`` on, the default is alike on all ranks: a model or
data that are made there are those of one device. Then the common one goes on from it, and ranks draw apart.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_APART = 1 << 32


class CommonRandom:
    """The generator that ranks have in common, until it is closed.

    Args:
        state: Of torch's default generator, the same on all ranks.
    """

    def __init__(self, state: Tensor, rank: int) -> None:
        self.state, self._rank = state, rank
        self.told: Callable[..., list[list[float]]] = lambda *numbers: [[*numbers]]
        """Tells all ranks three numbers, and gives those of all."""
        self._seeded: tuple[int, Tensor | None] | None = None
        """With what the default generator was seeded since an order was drawn, and its state before."""
        self._watches = False
        self.close = self._replaced()

    def _replaced(self) -> Callable[[], None]:
        """Learns of each seeding until what is returned is called."""
        seed_default = torch.manual_seed

        @functools.wraps(seed_default)
        def manual_seed(seed: Any) -> torch.Generator:
            before = torch.get_rng_state()
            found = seed_default(seed)
            if self._watches:
                self._seeded = found.initial_seed(), before
            return found

        torch.manual_seed = manual_seed

        def restore() -> None:
            self._watches = False
            if torch.manual_seed is manual_seed:
                torch.manual_seed = seed_default

        return restore

    def watch(self) -> None:
        """From now on the loop draws, and who seeds is the loop."""
        torch.set_rng_state(self.state)
        self._seeded, self._watches = (torch.initial_seed(), None), True

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """What is drawn inside from the default generator is the same on all ranks. A collective call now and then."""
        self.follow()
        own = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(own)

    def follow(self) -> None:
        """Goes on from a seed that was set. A collective call if one was.

        What the loop has drawn since counts where all ranks drew the same, and not what their samples made them draw.
        Seeds that differ are of each rank's own numbers.
        """
        if self._seeded is None:
            return
        (seed, before), self._seeded = self._seeded, None
        if torch.initial_seed() != seed:
            return  # within torch.random.fork_rng, which has taken it back
        own, fresh = torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state()
        taken_back = before is not None and torch.equal(own, before) and not torch.equal(own, fresh)
        rows = self.told(float(_sum_of(own)), float(seed % _APART), float(taken_back))
        if len({row[1] for row in rows}) > 1 or any(row[2] for row in rows):
            return
        if len({row[0] for row in rows}) == 1:
            self.state = own
        elif before is not None:
            self.state = fresh
        self._draw_apart()

    def _draw_apart(self) -> None:
        if self._rank:
            torch.set_rng_state(apart(_sum_of(self.state), self._rank).get_state())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is drawn or seeded inside leaves the default generator as it was."""
        state, watched, self._watches = torch.get_rng_state(), self._watches, False
        try:
            yield
        finally:
            self._watches = watched
            torch.set_rng_state(state)

    def held(self) -> Tensor:
        """The state now."""
        return self.state

    def take(self, state: Tensor) -> None:
        """Goes on from a state that :meth:`held` gave."""
        self.state = state
        if self._seeded is not None:
            self._seeded = None
            self._draw_apart()


def _sum_of(state: Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def apart(seed: int, rank: int) -> torch.Generator:
    """A generator for a rank's workers, whose random numbers are for its own samples."""
    return torch.Generator().manual_seed((seed + _APART * rank) % 2**63)
