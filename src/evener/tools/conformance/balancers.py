"""Conformance test of a balancer: checks its promises in a short run over ranks of simulated speeds.

As a loader does, the run asks for the shares of the current step and of steps to be prefetched. As a training does, it
reports the time of each rank, and sometimes leaves one out. So a learning balancer has data to learn from, and a fixed
one gets only calls that it must support.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from evener.balance.base import Balancer
from evener.balance.registry import make_balancer, make_own
from evener.balance.shares import validate_shares
from evener.core.call_by_name import names_taken
from evener.data.fingerprint import generators_kept
from evener.errors import ShareError
from evener.tools.conformance.errors import broken

BATCH_SIZES = (0, 1, 2, 7, 64, 97, 1000)
STEPS = 40
LOOKAHEAD = 2


def check_balancer(
    make: str | Callable[..., Balancer],
    world_size: int = 3,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    steps: int = STEPS,
) -> None:
    """Checks that a balancer keeps every promise of :class:`evener.balance.Balancer`.

    Args:
        make: A value that ``--balance`` takes, or what such a name stands for: a class or function with any of the
            parameters ``world_size``, ``max_shares``, ``share_multiple_of`` and ``lookahead``. Limits are tested if
            it has parameters for them. The tested ones allow samples on every rank.
        world_size: Number of ranks.
        batch_sizes: Batch sizes that each step asks to divide.
        steps: Length of each run.

    Raises:
        ConformanceError: If a promise is broken. Says which, in which step and for which batch.
        ShareError: If there is no such balancer, or it does not support this number of ranks.
    """
    trial = BalancerTrial(make, world_size, tuple(batch_sizes), steps)
    with generators_kept():
        first = trial.run(trial.made(seed=1))
        _check_decisions(trial, first)
        _check_determinism(trial, first)
        _check_caps(trial)
        _check_multiple(trial)
        _check_state(trial, first)


@dataclass
class History:
    """A balancer and the shares it returned in a run."""

    balancer: Balancer
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Shares by step and batch size."""


@dataclass(frozen=True)
class BalancerTrial:
    """The balancer under test, and the size of the runs."""

    make: str | Callable[..., Balancer]
    world_size: int
    batch_sizes: tuple[int, ...]
    steps: int

    @property
    def name(self) -> str:
        return self.make if isinstance(self.make, str) else getattr(self.make, "__name__", repr(self.make))

    @property
    def knows_limits(self) -> set[str]:
        """The limits it has parameters for: ``max_shares``, ``share_multiple_of``. Evener's own balancers take both."""
        function: Callable[..., Balancer] | str = self.make
        if isinstance(function, str):
            if ":" not in function:
                return {"max_shares", "share_multiple_of"}
            function = type(make_balancer(function, self.world_size))
        return names_taken(function, _offered(self.world_size)) & {"max_shares", "share_multiple_of"}

    def made(self, seed: int = 0, **limits: Any) -> Balancer:
        """Makes a new balancer, after seeding all random generators with ``seed``."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        if isinstance(self.make, str):
            return make_balancer(self.make, self.world_size, lookahead=LOOKAHEAD, **limits)
        return make_own(self.make, self.name, {**_offered(self.world_size), **limits})

    def run(
        self,
        balancer: Balancer,
        first: int = 0,
        batch_sizes: tuple[int, ...] | None = None,
        max_shares: Sequence[int | None] | None = None,
    ) -> History:
        """Asks for shares and reports times in all steps, and checks every answer."""
        history = History(balancer)
        for step in range(first, first + self.steps):
            for asked in range(step, step + LOOKAHEAD + 1):
                for size in batch_sizes or self.batch_sizes:
                    self._ask(history, asked, size, max_shares)
            size = (batch_sizes or self.batch_sizes)[step % len(batch_sizes or self.batch_sizes)]
            shares = history.answers[step, size]
            self._tell(balancer, step, shares)
        return history

    def _ask(self, history: History, step: int, size: int, max_shares: Sequence[int | None] | None) -> None:
        shares = history.balancer.shares(step, size)
        where = f"Step {step}, a batch of {size} over {self.world_size} ranks: {shares!r}"
        if not isinstance(shares, list) or not all(type(share) is int for share in shares):
            raise broken(self.name, "shares are a list of int", where)
        try:
            validate_shares(shares, size, self.world_size, max_shares)
        except ShareError as error:
            raise broken(self.name, ADD_UP, f"{where}: {error}") from error
        before = history.answers.setdefault((step, size), list(shares))
        if shares != before:
            raise broken(self.name, STAY, f"{where}, and {before} before")
        shares.clear()  # changing the returned list must not affect the next answer
        again = history.balancer.shares(step, size)
        if again != before:
            raise broken(self.name, STAY, f"Step {step}, a batch of {size}: {before}, and then {again}")

    def _tell(self, balancer: Balancer, step: int, shares: list[int]) -> None:
        seconds = self.seconds(step, shares)
        try:
            balancer.observe(step, shares, seconds)
        except Exception as error:
            seen = f"observe({step}, {shares}, {seconds}) raised {type(error).__name__}: {error}"
            raise broken(self.name, HEARS, seen) from error

    def seconds(self, step: int, shares: Sequence[int]) -> list[float]:
        """Simulates seconds per rank. Rank r is r + 1 times as slow as rank 0.

        NaN for a rank without samples, and for rank 0 in every fifth step.
        """
        times = [(0.002 + 0.001 * share) * (rank + 1) for rank, share in enumerate(shares)]
        absent = [share == 0 or (step % 5 == 4 and rank == 0) for rank, share in enumerate(shares)]
        return [math.nan if none else time for none, time in zip(absent, times, strict=True)]


ADD_UP = "shares are one integer of at least 0 for each rank, within max_shares, and add up to the batch"
STAY = "shares are the same whenever they are asked for the same step and batch"
HEARS = "it takes every rank's time, NaN where there is none"


def _offered(world_size: int) -> dict[str, Any]:
    return {"world_size": world_size, "max_shares": None, "share_multiple_of": 1, "lookahead": LOOKAHEAD}


def _check_decisions(trial: BalancerTrial, history: History) -> None:
    for decision in history.balancer.decisions:
        batches = sum(decision.old_shares), sum(decision.new_shares)
        if decision.effective_step <= decision.step or batches[0] != batches[1]:
            raise broken(
                trial.name, "a decision divides one batch anew, from a later step on", decision.words
            )


def _check_determinism(trial: BalancerTrial, first: History) -> None:
    for seed in range(2, 6):
        other = trial.run(trial.made(seed))
        for (step, size), shares in first.answers.items():
            if other.answers[step, size] != shares:
                raise broken(
                    trial.name,
                    "ranks with equal inputs get equal shares",
                    f"Step {step}, a batch of {size}: {shares}, and {other.answers[step, size]} of another one that "
                    "was told the same; random numbers must be drawn from the step",
                )


def _check_caps(trial: BalancerTrial) -> None:
    if "max_shares" not in trial.knows_limits:
        return
    max_shares: list[int | None] = [3 + rank for rank in range(trial.world_size)]
    most = sum(3 + rank for rank in range(trial.world_size))
    try:
        trial.run(
            trial.made(max_shares=max_shares),
            batch_sizes=(0, 1, most // 2, most - 1, most),
            max_shares=max_shares,
        )
    except ShareError as error:
        raise broken(
            trial.name,
            "a batch that max_shares can hold is divided",
            f"max_shares {max_shares}, up to {most}: {error}",
        ) from error
    try:
        shares = trial.made(max_shares=max_shares).shares(0, most + 1)
    except ShareError:
        return
    raise broken(
        trial.name,
        "a batch that max_shares cannot hold is a ShareError",
        f"max_shares {max_shares}, a batch of {most + 1}: {shares}",
    )


def _check_multiple(trial: BalancerTrial) -> None:
    if "share_multiple_of" not in trial.knows_limits:
        return
    promise = "shares are multiples of share_multiple_of, but for one"
    try:
        history = trial.run(trial.made(share_multiple_of=4))
    except ShareError as error:
        raise broken(trial.name, promise, f"share_multiple_of=4: {error}") from error
    for (step, size), shares in history.answers.items():
        if sum(share % 4 != 0 for share in shares) > 1:
            raise broken(
                trial.name, promise, f"Step {step}, a batch of {size}, share_multiple_of=4: {shares}"
            )


def _check_state(trial: BalancerTrial, history: History) -> None:
    promise = "a balancer goes on from its state, through JSON, as if nothing had happened"
    state = history.balancer.state_dict()
    try:
        kept = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise broken(trial.name, promise, f"The state is no plain values ({error}): {state!r}") from error
    other = trial.made()
    other.load_state_dict(kept)
    went_on, resumed = trial.run(history.balancer, trial.steps), trial.run(other, trial.steps)
    for (step, size), shares in went_on.answers.items():
        if resumed.answers[step, size] != shares:
            raise broken(
                trial.name,
                promise,
                f"Step {step}, a batch of {size}: {resumed.answers[step, size]}, not {shares}",
            )
