"""Random numbers that all ranks draw alike, as one device would draw them.

What decides which samples come is torch's default generator, from which a shuffling sampler takes its seed. On ranks
the model draws from it too, for other samples on each, so that after a step no two would shuffle alike. So there are
two: the one that all ranks hold in common is put in the place of the default while an order is drawn, and the
default is each rank's own again. That is so of one rank, too: its order is that of any number of ranks, and no layer
that draws moves it.

Until the first order is drawn, and again from each seed or state on that the loop sets, the default is alike on all
ranks: a model or data that are made there are those of one device. Then the common one goes on from it, and ranks draw
apart. A state that is put back, as by ``torch.random.fork_rng``, is none that was set.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_APART = 1 << 32
_REMEMBERED = 4096
"""States that were read last."""


class Seeding(NamedTuple):
    """The loop has set the default generator."""

    start: Tensor
    """To this state."""
    before: Tensor | None = None
    """In place of this one, where that is known."""


class Watched:
    """The default generator as the functions of ``torch.random`` know it: who sets it through them is noted.

    Whatever name they go by: ``torch.manual_seed``, ``torch.random.manual_seed``, or one that was imported before.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.seeding: Seeding | None = None
        """The last that was not answered."""
        self.is_on = False
        self._read: dict[int, Seeding | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_state(self) -> Tensor:
        """Remembers how things were, for when the state is put back."""
        state = self._generator.get_state()
        if self.is_on:
            self._read.pop(_sum_of(state), None)
            self._read[_sum_of(state)] = self.seeding
            if len(self._read) > _REMEMBERED:
                del self._read[next(iter(self._read))]
        return state

    def set_state(self, state: Tensor) -> torch.Generator:
        """Seeds, unless the state is one that was read."""
        before = self._generator.get_state()
        self._generator.set_state(state)
        if self.is_on:
            self.seeding = self._read.get(_sum_of(state), Seeding(state.clone(), before))
        return self._generator

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seeds."""
        before = self._generator.get_state()
        self._generator.manual_seed(seed)
        self._note(before)
        return self._generator

    def seed(self) -> int:
        """Seeds with another number on each rank."""
        before = self._generator.get_state()
        found = self._generator.seed()
        self._note(before)
        return found

    def _note(self, before: Tensor) -> None:
        if self.is_on:
            self.seeding = Seeding(self._generator.get_state(), before)


class CommonRandom:
    """The generator that ranks have in common, until it is closed.

    Args:
        state: Of torch's default generator, the same on all ranks.
    """

    def __init__(self, state: Tensor, rank: int) -> None:
        self.state, self._rank = state, rank
        self.told: Callable[..., list[list[float]]] = lambda *numbers: [[*numbers]]
        """Tells all ranks three numbers, and gives those of all."""
        self._default = torch.default_generator
        self._watched = Watched(self._default)
        self._known = {self._default.initial_seed()}
        self.close = self._replaced()

    def _replaced(self) -> Callable[[], None]:
        """Learns of each seeding until what is returned is called."""
        module: Any = torch.random
        before, module.default_generator = module.default_generator, self._watched

        def restore() -> None:
            self._watched.is_on = False
            if module.default_generator is self._watched:
                module.default_generator = before

        return restore

    def watch(self) -> None:
        """From now on the loop draws, and who seeds is the loop."""
        self._default.set_state(self.state)
        self._known = {self._default.initial_seed()}
        self._watched.seeding, self._watched.is_on = Seeding(self.state.clone()), True

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """What is drawn inside from the default generator is the same on all ranks. A collective call now and then."""
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
        """Goes on from a seed or a state that was set. A collective call if one was.

        What the loop has drawn since counts where all ranks drew the same, and not what their samples made them draw.
        Seeds that differ are of each rank's own numbers.
        """
        seeding, self._watched.seeding = self._watched.seeding, None
        seed = self._default.initial_seed()
        if seeding is not None and seed != _seed_of(seeding.start):
            seeding = None  # put back in a way that nobody could see, or set again
        if seeding is None and seed in self._known:
            return
        start, before = seeding or Seeding(_seeded(seed))  # else by ``torch.default_generator`` itself
        own = self._default.get_state()
        taken_back = before is not None and torch.equal(own, before) and not torch.equal(own, start)
        rows = self.told(float(_sum_of(own)), float(_sum_of(start)), float(taken_back))
        self._known = {seed}
        if len({row[1] for row in rows}) > 1 or any(row[2] for row in rows):
            return
        self.state = own if len({row[0] for row in rows}) == 1 else start
        self._draw_apart()

    def _draw_apart(self) -> None:
        if self._rank:
            self._default.set_state(apart(_sum_of(self.state), self._rank).get_state())
        self._known.add(self._default.initial_seed())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is drawn or seeded inside leaves the default generator as it was."""
        state, watched, self._watched.is_on = self._default.get_state(), self._watched.is_on, False
        try:
            yield
        finally:
            self._watched.is_on = watched
            self._default.set_state(state)

    def held(self) -> Tensor:
        """The state now."""
        return self.state

    def take(self, state: Tensor) -> None:
        """Goes on from a state that :meth:`held` gave."""
        self.state = state
        if self._watched.seeding is not None:
            self._watched.seeding = None
            self._draw_apart()
        self._known.add(self._default.initial_seed())


def _sum_of(state: Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def _seeded(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _seed_of(state: Tensor) -> int:
    return torch.Generator().set_state(state).initial_seed()


def apart(seed: int, rank: int) -> torch.Generator:
    """A generator for a rank's workers, whose random numbers are for its own samples."""
    return torch.Generator().manual_seed((seed + _APART * rank) % 2**63)
