"""The base class of balancers, and the two balancers whose shares do not depend on measurements.

A balancer divides each global batch over the ranks. Every rank has its own balancer and asks only that one. Balancers
are deterministic: with equal inputs, all ranks get the same shares without communication. A balancer decides how many
samples each rank takes, never which: the batch and the order of its samples are the same as on one device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from evener.balance.shares import normalize_max_shares, normalize_weights, solve

_SHOWN = 16
"""With more ranks than this, only the least and the greatest share are printed."""


@dataclass(frozen=True)
class Decision:
    """Record of one change of shares."""

    kind: ClassVar[str] = "decision"
    step: int
    """Step after which the change was decided."""
    effective_step: int
    """First step with the new shares."""
    old_shares: tuple[int, ...]
    new_shares: tuple[int, ...]
    seconds_before: float
    """Predicted compute time of a step (that of its slowest rank) with the old shares."""
    seconds_after: float
    """Predicted compute time of a step (that of its slowest rank) with the new shares."""
    reason: str

    @property
    def words(self) -> str:
        """The decision as one line of text. Counts steps from 1."""
        old, new = map(shares_in_words, (self.old_shares, self.new_shares))
        return f"step {self.step + 1}: shares {old} become {new} from step {self.effective_step + 1}: {self.reason}"


def shares_in_words(shares: Sequence[int]) -> str:
    """Formats shares as text: all of them if they are few, otherwise the least and the greatest."""
    if len(shares) <= _SHOWN:
        return "/".join(map(str, shares))
    return f"{min(shares)} to {max(shares)} ({len(shares)} of them)"


class Balancer(ABC):
    """Divides each global batch over the ranks. Subclasses must implement ``shares``."""

    @abstractmethod
    def shares(self, step: int, batch_size: int) -> list[int]:
        """Returns the number of samples of each rank in ``step``; they must add up to ``batch_size``.

        The result must be the same on every rank, and the same for every call with the same step.
        """

    def fractions(self, step: int, batch_size: int) -> Sequence[float]:
        """Returns the part of the cost of ``step`` that each rank should have, for a task that gives costs.

        By default these are the shares of samples of equal cost, divided by ``batch_size``.
        """
        return [n / batch_size for n in self.shares(step, batch_size)]

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:  # noqa: B027
        """Learns from one step.

        Args:
            step: The number of the step.
            sizes: Each rank's number of samples.
            seconds: Each rank's compute time, without waiting for other ranks; NaN if it was not measured.
        """

    def observe_costs(
        self, step: int, sizes: Sequence[int], costs: Sequence[float], seconds: Sequence[float]
    ) -> None:
        """Learns from one step of a task that gives costs.

        By default scales each time in proportion from the rank's cost to its share, and calls ``observe``.

        Args:
            step: The number of the step.
            sizes: The ``shares`` of the step.
            costs: The cost of each rank's samples, in samples of mean cost. Samples cannot be cut, so that it differs
                from ``sizes``, and so does the cost of the whole batch.
            seconds: As in ``observe``.
        """
        given = zip(sizes, costs, seconds, strict=True)
        self.observe(step, sizes, [time * n / cost if cost else time for n, cost, time in given])

    @property
    def decisions(self) -> Sequence[Decision]:
        """All changes of shares so far, in order."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint, as values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores the state that ``state_dict`` returned."""


class Fixed(Balancer):
    """Divides each batch in proportion to fixed weights, rounded by largest remainders.

    Without limits each share is within one multiple of its exact value.

    Args:
        weights: One weight for each rank, in any unit; a rank with weight 0 gets no samples.
        max_shares: The most samples of each rank. Samples above a cap are spread evenly over the other ranks.
        share_multiple_of: Shares are multiples of it, except the one share that holds the remainder of the batch.

    Raises:
        ShareError: For invalid weights or limits, and from ``shares`` for a batch that exceeds the limits.
    """

    def __init__(
        self,
        weights: Sequence[float],
        *,
        max_shares: Sequence[int | None] | None = None,
        share_multiple_of: int = 1,
    ) -> None:
        self.weights = normalize_weights(weights, len(weights))
        given = normalize_max_shares(max_shares, len(weights))
        self._max_shares = [cap if weight else 0 for weight, cap in zip(self.weights, given, strict=True)]
        self._share_multiple_of = share_multiple_of
        self._solved: dict[int, list[int]] = {}

    def shares(self, step: int, batch_size: int) -> list[int]:
        if batch_size not in self._solved:
            # Each multiple goes to the rank farthest below its exact part. This rounds by largest remainders.
            beyond = [lambda n, part=weight * batch_size: n - part for weight in self.weights]
            self._solved[batch_size] = solve(beyond, batch_size, self._max_shares, self._share_multiple_of)
        return list(self._solved[batch_size])

    def fractions(self, step: int, batch_size: int) -> Sequence[float]:
        """Returns the weights, which whole samples have not rounded, unless the shares of some ranks are capped."""
        capped = any(
            cap is not None and weight for weight, cap in zip(self.weights, self._max_shares, strict=True)
        )
        return super().fractions(step, batch_size) if capped else self.weights


class Equal(Fixed):
    """Gives every rank the same number of samples. If a batch does not divide evenly, lower ranks take one more."""

    def __init__(
        self, world_size: int, *, max_shares: Sequence[int | None] | None = None, share_multiple_of: int = 1
    ) -> None:
        super().__init__([1.0] * world_size, max_shares=max_shares, share_multiple_of=share_multiple_of)
