"""Balancers that no run would use; tests name them as ``tests.balancers:NAME``."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from evener.balance.base import Balancer, Decision


class Random(Balancer):
    """Other shares in every step, drawn from the step's number: often unequal, now and then 0."""

    def __init__(self, world_size: int, **_: Any) -> None:
        self._world_size = world_size

    def shares(self, step: int, batch_size: int) -> list[int]:
        draw = random.Random(step)
        cuts = sorted(draw.randint(0, batch_size) for _ in range(self._world_size - 1))
        return [end - begin for begin, end in zip([0, *cuts], [*cuts, batch_size], strict=True)]


class Recorder(Random):
    """Remembers what it was told, and says after every third step that it took a decision."""

    made = 0
    """So often in this process."""

    def __init__(self, world_size: int, **options: Any) -> None:
        Recorder.made += 1
        super().__init__(world_size)
        self.options = options
        self.observed: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = []
        self._decisions: list[Decision] = []

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self.observed.append((step, tuple(sizes), tuple(seconds)))
        if step % 3 == 2:
            self._decisions.append(
                Decision(step, step + 3, (8, 5), (9, 4), 0.02, 0.01, f"step {step} is over")
            )

    @property
    def decisions(self) -> Sequence[Decision]:
        return self._decisions

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.observed[-1][0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken_up = state


class Even(Recorder):
    """Equal parts, as far as that goes."""

    def shares(self, step: int, batch_size: int) -> list[int]:
        part, rest = divmod(batch_size, self._world_size)
        return [part + (rank < rest) for rank in range(self._world_size)]


class OfItsOwnMind(Even):
    """Of all ranks the last comes to other shares, from some step on."""

    def __init__(self, world_size: int, **_: Any) -> None:
        super().__init__(world_size)
        self._differs_from = int(os.environ.get("DIFFERS_FROM", "3"))

    def shares(self, step: int, batch_size: int) -> list[int]:
        found = super().shares(step, batch_size)
        if step >= self._differs_from and dist.get_rank() == dist.get_world_size() - 1:
            found.reverse()
        return found
