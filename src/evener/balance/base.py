"""What divides each global batch over the ranks, and the two that need nothing but a rule.

Every rank holds its own balancer and asks it alone: a balancer is deterministic, so that ranks with equal
inputs agree without a message. It decides how many samples each rank takes, never which: the batch and the
order of its samples are what they are on one device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from evener.balance.shares import normalize_caps, normalize_weights, solve

_SHOWN = 16
"""Most shares that are shown one by one."""


@dataclass(frozen=True)
class Decision:
    """A change of shares, as a record."""

    kind: ClassVar[str] = "decision"
    step: int
    """The step after which it was decided."""
    effective_step: int
    """The first step with the new shares."""
    old_shares: tuple[int, ...]
    new_shares: tuple[int, ...]
    seconds_before: float
    """Predicted compute time of a step, that of its slowest rank, with the old shares."""
    seconds_after: float
    """The same with the new shares."""
    reason: str

    @property
    def words(self) -> str:
        """The decision in a line."""
        old, new = map(shares_in_words, (self.old_shares, self.new_shares))
        return f"step {self.step + 1}: shares {old} become {new} from step {self.effective_step + 1}: {self.reason}"


def shares_in_words(shares: Sequence[int]) -> str:
    """One by one, or of many the least and the greatest."""
    if len(shares) <= _SHOWN:
        return "/".join(map(str, shares))
    return f"{min(shares)} to {max(shares)} ({len(shares)} of them)"


class Balancer(ABC):
    """Divides each global batch; an extender writes ``shares``."""

    @abstractmethod
    def shares(self, step: int, batch_size: int) -> list[int]:
        """Samples of each rank in ``step``; they add up to ``batch_size``, whatever that is.

        The same on every rank, and the same whenever it is asked for the same step.
        """

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:  # noqa: B027
        """Learns each rank's time of its own work in ``step``, waiting left out; NaN where there is none."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """The changes of shares so far, in order."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on as if nothing had happened, as plain values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Takes over what ``state_dict`` returned."""


class Fixed(Balancer):
    """Shares in proportion to weights, each within one quantum of its exact part (largest remainders).

    Args:
        weights: One for each rank, in any unit; a weight of 0 gives no sample.
        caps: The most samples of each rank; what it cannot take is spread evenly over the others.
        quantum: Shares are multiples of it, but for the one that holds the remainder of the batch.

    Raises:
        ShareError: For weights that are none, and from ``shares`` for a batch above the caps.
    """

    def __init__(
        self, weights: Sequence[float], *, caps: Sequence[int | None] | None = None, quantum: int = 1
    ) -> None:
        self.weights = normalize_weights(weights, len(weights))
        given = normalize_caps(caps, len(weights))
        self._caps = [cap if weight else 0 for weight, cap in zip(self.weights, given, strict=True)]
        self._quantum = quantum
        self._solved: dict[int, list[int]] = {}

    def shares(self, step: int, batch_size: int) -> list[int]:
        if batch_size not in self._solved:
            # The rank farthest below its exact part is next, which is rounding by largest remainders.
            beyond = [lambda n, part=weight * batch_size: n - part for weight in self.weights]
            self._solved[batch_size] = solve(beyond, batch_size, self._caps, self._quantum)
        return list(self._solved[batch_size])


class Equal(Fixed):
    """The same number of samples for every rank; where that is not whole, the lower ranks take one more."""

    def __init__(
        self, world_size: int, *, caps: Sequence[int | None] | None = None, quantum: int = 1
    ) -> None:
        super().__init__([1.0] * world_size, caps=caps, quantum=quantum)
