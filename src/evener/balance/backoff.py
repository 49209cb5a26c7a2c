"""Raises the thresholds for changes of shares after changes that did not pay, for a while."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.balance.policy import Policy, PredictedChange

MOST_PATIENCE = 4.0


@dataclass
class Backoff:
    """Factors by which the thresholds for changes are raised; 1 at first."""

    small: float = 1.0
    """Factor of the gain that a trial requires. A failed trial doubles it, a successful one halves it."""
    sudden: float = 1.0
    """Factor of the thresholds for an immediate change and for detecting a change of speed. Grows when an immediate
    change is reverted."""
    last: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    """Step, old shares and new shares of the last immediate change."""

    def forget(self, policy: Policy) -> None:
        """Lets both factors decay towards 1. Called once per step."""
        kept = 0.5 ** (1 / policy.doubt_steps)
        self.small, self.sudden = 1 + (self.small - 1) * kept, 1 + (self.sudden - 1) * kept

    def failed(self, policy: Policy) -> None:
        """Raises ``small`` after a failed trial."""
        self.small = min(2 * self.small, policy.most_doubt)

    def paid(self) -> None:
        """Lowers ``small`` after a successful trial."""
        self.small = max(1.0, self.small / 2)

    def rash(self, factor: float) -> None:
        """Raises ``sudden`` after an immediate change that did not pay."""
        self.sudden = min(factor * self.sudden, MOST_PATIENCE)

    def jumped(self, step: int, old: Sequence[int], new: Sequence[int], policy: Policy) -> None:
        """Records an immediate change. If it soon reverts the last one, raises ``sudden``."""
        last, self.last = self.last, (step, tuple(old), tuple(new))
        if last is None or step - last[0] > policy.return_steps or sum(last[1]) != sum(new):
            return
        if 2 * _apart(new, last[1]) < _apart(old, last[1]):
            self.rash(1.5)

    def is_sure(self, verdict: PredictedChange, policy: Policy, changed: bool = False) -> bool:
        """Returns True if a change needs no trial. If a rank's speed has ``changed``, less gain suffices."""
        least = policy.sure_gain * (2 / 3 if changed else 1)
        return verdict.gain > self.sudden * max(least, policy.errors * verdict.error)

    def is_worth_a_trial(self, verdict: PredictedChange, policy: Policy) -> bool:
        """Returns True if the predicted gain is large enough for a trial."""
        error = policy.trial_errors * math.sqrt(self.small) * verdict.error
        return verdict.gain > max(policy.least_gain * self.small, error)

    def values(self) -> list[Any]:
        return [self.small, self.sudden, self.last and [self.last[0], *map(list, self.last[1:])]]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Backoff:
        small, sudden, last = values
        return cls(small, sudden, (last[0], tuple(last[1]), tuple(last[2])) if last else None)


def _apart(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True))
