"""Random numbers that all ranks draw alike, as one device would draw them.

A shuffling sampler takes its seed from torch's default generator. On each rank the model draws from it too, for other
samples. So after a step no two ranks would shuffle alike. Therefore there are two generators: a common one, the same on
all ranks, replaces the default while an order is drawn; afterwards the default is each rank's own again. One rank works
the same way: its order is that of any number of ranks, and a layer that draws does not change it.

Until the first order is drawn, and again after the loop sets a seed or a state, the default is the same on all ranks: a
model or data made then are those of one device. Then the common generator continues from it, and the ranks draw apart.
Restoring an earlier state, as ``torch.random.fork_rng`` does, does not count as setting one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_APART = 1 << 32
_REMEMBERED = 4096
"""Number of states read last that are remembered."""


class Watched:
    """Stands for the default generator in ``torch.random``, and notices when the loop seeds it.

    This covers all names of the functions: ``torch.manual_seed``, ``torch.random.manual_seed``, or an earlier import.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.seeding: Tensor | None = None
        """The state to which the loop has set the generator last, if that was not processed yet."""
        self.is_on = False
        self._read: dict[int, Tensor | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_state(self) -> Tensor:
        """Returns the state, and remembers it so that restoring it later is recognized."""
        state = self._generator.get_state()
        if self.is_on:
            self._read.pop(_sum_of(state), None)
            self._read[_sum_of(state)] = self.seeding
            if len(self._read) > _REMEMBERED:
                del self._read[next(iter(self._read))]
        return state

    def set_state(self, state: Tensor) -> torch.Generator:
        """Sets the state. Counts as seeding, unless the state was read before."""
        self._generator.set_state(state)
        if self.is_on:
            self.seeding = self._read.get(_sum_of(state), state.clone())
        return self._generator

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seeds the generator."""
        self._generator.manual_seed(seed)
        self._note()
        return self._generator

    def seed(self) -> int:
        """Seeds the generator with another number on each rank."""
        found = self._generator.seed()
        self._note()
        return found

    def _note(self) -> None:
        if self.is_on:
            self.seeding = self._generator.get_state()


class CommonRandom:
    """The generator that the ranks have in common, until it is closed.

    Args:
        state: State of torch's default generator, the same on all ranks.
    """

    def __init__(self, state: Tensor, rank: int) -> None:
        self.state, self._rank = state, rank
        self.exchange: Callable[..., list[list[float]]] = lambda *numbers: [[*numbers]]
        """Exchanges two numbers with all ranks; returns those of all."""
        self._default = torch.default_generator
        self._watched = Watched(self._default)
        self._known = {self._default.initial_seed()}
        self.close = self._replaced()

    def _replaced(self) -> Callable[[], None]:
        """Starts to watch for seeding. Returns a function that ends it."""
        module: Any = torch.random
        before, module.default_generator = module.default_generator, self._watched

        def restore() -> None:
            self._watched.is_on = False
            if module.default_generator is self._watched:
                module.default_generator = before

        return restore

    def watch(self) -> None:
        """Begins the loop: from now on, seeding is done by the loop."""
        self._default.set_state(self.state)
        self._known = {self._default.initial_seed()}
        self._watched.seeding, self._watched.is_on = self.state.clone(), True

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Context in which the default generator draws the same on all ranks. May be a collective call (``follow``)."""
        self.follow()
        own, seeding = self._default.get_state(), self._watched.seeding
        self._default.set_state(self.state)
        try:
            yield
        finally:
            self.state = self._default.get_state()
            self._default.set_state(own)
            self._watched.seeding = seeding

    def follow(self) -> None:
        """Continues from a seed or a state that the loop has set. A collective call if it has.

        Numbers that the loop has drawn since count only if all ranks drew the same, not if they depend on a rank's
        samples. Seeds that differ between ranks are for each rank's own numbers and are ignored.
        """
        start, self._watched.seeding = self._watched.seeding, None
        seed = self._default.initial_seed()
        if start is not None and seed != torch.Generator().set_state(start).initial_seed():
            start = None  # restored unnoticed, or set again
        if start is None:
            if seed in self._known:
                return
            start = torch.Generator().manual_seed(seed).get_state()  # by ``torch.default_generator`` itself
        own = self._default.get_state()
        rows = self.exchange(float(_sum_of(own)), float(_sum_of(start)))
        self._known = {seed}
        if len({row[1] for row in rows}) > 1:
            return
        self.state = own if len({row[0] for row in rows}) == 1 else start
        self._draw_apart()

    def _draw_apart(self) -> None:
        if self._rank:
            self._default.set_state(apart(_sum_of(self.state), self._rank).get_state())
        self._known.add(self._default.initial_seed())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context that leaves the default generator as it was, whatever is drawn or seeded inside."""
        state, watched, self._watched.is_on = self._default.get_state(), self._watched.is_on, False
        try:
            yield
        finally:
            self._watched.is_on = watched
            self._default.set_state(state)

    def held(self) -> Tensor:
        """Returns the current state."""
        return self.state

    def paused(self) -> Callable[[CommonRandom], None]:
        """Returns a function that lets those of a later preparation go on from here, as if there had been one alone."""
        state, own, seeding = self.state, self._default.get_state(), self._watched.seeding

        def go_on(later: CommonRandom) -> None:
            later.state, later._known, later._watched.seeding = state, self._known, seeding
            later._default.set_state(own)

        return go_on

    def load_state(self, state: Tensor) -> None:
        """Continues from a state that :meth:`held` returned."""
        self.state = state
        if self._watched.seeding is not None:
            self._watched.seeding = None
            self._draw_apart()
        self._known.add(self._default.initial_seed())


def _sum_of(state: Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def apart(seed: int, rank: int) -> torch.Generator:
    """Returns a generator for one rank's workers, for random numbers of its own samples."""
    return torch.Generator().manual_seed((seed + _APART * rank) % 2**63)
