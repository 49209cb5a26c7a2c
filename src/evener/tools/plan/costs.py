"""What a step costs, as functions of its samples, and the time that follows for any batch and any shares.

::

    rank 0   input  passes ───────────────┐
    rank 1   input  passes ───  waiting ──┴─ communication ─ update        a step
                    fixed + each · samples

The passes of a rank take a line of its samples. Everything after the slowest rank's passes is one more line, of the
samples of the batch. A pipeline's micro-batches are as many passes. All decisions here are made by pure functions:
whoever has the same costs gets the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from evener.balance.base import Fixed
from evener.balance.shares import solve
from evener.balance.time_model import Line

LEAST_SPREAD = 0.02
"""The smallest relative standard deviation of a prediction: two runs of the same command differ by about that."""
PER_DOUBLING = 0.1
"""What each doubling of the batch away from the nearest size that was tried adds to it."""
UNMEASURED_SPREAD = 0.25
"""The relative standard deviation of what no device at hand has measured. Analytic models of other tools state errors
of 5 to 15 % on devices that they were fitted to (Maya, Charon, vTrain), and more on others."""
NOTHING = Line(0.0, 0.0)
QUANTILES = (0.05, 0.1, 0.5, 0.9, 0.95)


@dataclass(frozen=True)
class StepCosts:
    """The costs of a step in one way over a number of ranks."""

    compute: tuple[Line, ...]
    """For each rank its passes, by its own samples."""
    parts: int
    """The number of shares of a batch. Ranks that compute the same samples have one together."""
    blocking: Line = NOTHING
    """Communication within the passes, as of tensor parallelism, by a rank's own samples."""
    rest: Line = NOTHING
    """Communication and whatever else comes after the passes, by the samples of the batch. What was measured may
    become less with the batch, where more of it hides behind the passes."""
    hidden: float = 0.0
    """The part of the passes behind which communication can hide."""
    exposed: float = 0.0
    """The seconds of communication that cannot hide: what the last gradients need."""
    update: float = 0.0
    """Seconds of the optimizer."""
    bubble: float = 0.0
    """The idle part of a pipeline, as a multiple of its passes."""
    input: Line = NOTHING
    """Waiting for samples, by a rank's own ones."""
    spread: float = UNMEASURED_SPREAD
    """The relative standard deviation of a prediction at the sizes that were tried."""
    setup: float = 0.0
    """Seconds until the first step is done, besides those of starting ranks: for making the model, the groups of ranks
    and the optimizer's state. 0 if that is not known."""
    pieces: int = 1
    """The most micro-batches into which a pipeline cuts a share, each of at least one sample. Each costs the fixed part
    of the passes again."""
    piece: float = 0.0
    """Seconds that each of them adds besides, as of messages and idle stages."""
    sizes: tuple[int, ...] = ()
    """The batch sizes that were tried. Empty if this way was not tried."""

    @property
    def is_measured(self) -> bool:
        return bool(self.sizes)

    def after_passes(self, batch_size: int, passes_seconds: float) -> float:
        """Returns the seconds of communication that do not hide behind the slowest rank's passes."""
        pieces = self.pieces_of(-(-batch_size // self.parts))
        rest = self.rest(batch_size) + self.piece * pieces
        return max(self.exposed, rest - self.hidden * passes_seconds, 0.0)

    def pieces_of(self, samples: int) -> int:
        """Returns the number of micro-batches into which a pipeline cuts a share; 1 without one."""
        return max(1, min(self.pieces, samples))


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, with its terms in seconds."""

    shares: tuple[int, ...]
    compute: float
    """The mean over the ranks."""
    waiting: float
    """What the slowest rank's passes take longer than that."""
    bubble: float
    communication: float
    """What does not hide behind the passes. In a way that was tried it holds the update, too."""
    update: float
    input: float
    spread: float
    """The relative standard deviation."""

    @property
    def seconds(self) -> float:
        """The median."""
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        """The terms by name. They add up to :attr:`seconds`."""
        names = ("compute", "waiting", "bubble", "communication", "update", "input")
        return {name: getattr(self, name) for name in names}

    def quantile(self, part: float) -> float:
        """Returns the seconds below which a run's median step is with a probability of ``part``: a lognormal law."""
        return self.seconds * math.exp(self.spread * NormalDist().inv_cdf(part))

    def largest(self) -> tuple[str, float]:
        """Returns the largest term besides compute, and its part of the step."""
        name = max((name for name in self.terms if name != "compute"), key=lambda each: self.terms[each])
        return name, self.terms[name] / self.seconds


def step_time(
    costs: StepCosts,
    batch_size: int,
    *,
    passes: int = 1,
    speeds: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    balanced: bool = False,
    max_shares: Sequence[int | None] | None = None,
    share_multiple_of: int = 1,
) -> StepTime:
    """Predicts a step.

    Args:
        passes: Forward and backward passes of a rank in a step. Each costs the fixed part again.
        speeds: For each rank a factor on the speed that was measured, as ``--throttle`` takes them.
        weights: Relative shares, for fixed ones.
        balanced: True for the shares with which the slowest rank is soonest through.
        max_shares: The most samples of each share; None, for all or for one, is no limit.
        share_multiple_of: Shares are multiples of it, but for one.

    Raises:
        ShareError: If there are not as many weights or limits as shares, or the limits cannot hold the batch.
    """
    ranks = len(costs.compute)
    factors = [1 / speed for speed in speeds or [1.0] * ranks]

    def took(rank: int, samples: int) -> float:
        line = costs.compute[rank]
        fixed = line.overhead_seconds * max(passes, costs.pieces_of(samples))
        return (fixed + line.seconds_per_sample * samples) * factors[rank]

    members = [list[int]() for _ in range(costs.parts)]
    for rank in range(ranks):
        members[part_of(rank, costs.parts, ranks)].append(rank)
    slowest = [lambda n, team=tuple(team): max(took(rank, n) for rank in team) for team in members]
    if balanced and costs.parts > 1:
        shares = solve(slowest, batch_size, max_shares, share_multiple_of)
    else:
        fixed = Fixed(
            weights or [1.0] * costs.parts, max_shares=max_shares, share_multiple_of=share_multiple_of
        )
        shares = fixed.shares(0, batch_size)
    own = [shares[part_of(rank, costs.parts, ranks)] for rank in range(ranks)]
    each = [took(rank, samples) for rank, samples in enumerate(own)]
    compute = min(max(each), sum(each) / ranks)  # a mean of equal numbers may be larger by rounding
    communication = max(map(costs.blocking, own)) + costs.after_passes(batch_size, max(each))
    return StepTime(
        tuple(shares),
        compute,
        max(each) - compute,
        max(each) * costs.bubble / passes,
        communication,
        costs.update,
        max(costs.input(samples) for samples in own),
        _spread(costs, batch_size),
    )


def part_of(rank: int, parts: int, ranks: int) -> int:
    """Returns the share that a rank computes, alone or with others next to it."""
    return rank * parts // ranks


def _spread(costs: StepCosts, batch_size: int) -> float:
    if not costs.sizes:
        return costs.spread
    nearest = min(abs(math.log2(batch_size / size)) for size in costs.sizes)
    return math.hypot(max(LEAST_SPREAD, costs.spread), PER_DOUBLING * nearest)
