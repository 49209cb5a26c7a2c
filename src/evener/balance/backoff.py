"""What changes that did not pay leave behind: the next ones are harder, for a while."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.balance.policy import Judgement, Policy

MOST_PATIENCE = 4.0


@dataclass
class Doubt:
    """How much more must speak for a change than usually."""

    small: float = 1.0
    """Factor of the gain that a trial needs: doubled by one that failed, halved by one that paid."""
    sudden: float = 1.0
    """Factor of what a change at once needs, and a change of speed to be seen: more after one that was made back."""
    last: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    """Step, old and new shares of the last change at once."""

    def forget(self, policy: Policy) -> None:
        """A step has passed."""
        kept = 0.5 ** (1 / policy.doubt_steps)
        self.small, self.sudden = 1 + (self.small - 1) * kept, 1 + (self.sudden - 1) * kept

    def failed(self, policy: Policy) -> None:
        self.small = min(2 * self.small, policy.most_doubt)

    def paid(self) -> None:
        self.small = max(1.0, self.small / 2)

    def rash(self, factor: float) -> None:
        self.sudden = min(factor * self.sudden, MOST_PATIENCE)

    def jumped(self, step: int, old: Sequence[int], new: Sequence[int], policy: Policy) -> None:
        """A change at once; one that is soon made back followed what did not last."""
        last, self.last = self.last, (step, tuple(old), tuple(new))
        if last is None or step - last[0] > policy.return_steps or sum(last[1]) != sum(new):
            return
        if 2 * _apart(new, last[1]) < _apart(old, last[1]):
            self.rash(1.5)

    def is_sure(self, verdict: Judgement, policy: Policy, changed: bool = False) -> bool:
        """Whether a change is made without a trial; where a rank's speed has ``changed``, less suffices."""
        least = policy.sure_gain * (2 / 3 if changed else 1)
        return verdict.gain > self.sudden * max(least, policy.errors * verdict.error)

    def is_worth_a_trial(self, verdict: Judgement, policy: Policy) -> bool:
        error = policy.trial_errors * math.sqrt(self.small) * verdict.error
        return verdict.gain > max(policy.least_gain * self.small, error)

    def values(self) -> list[Any]:
        return [self.small, self.sudden, self.last and [self.last[0], *map(list, self.last[1:])]]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Doubt:
        small, sudden, last = values
        return cls(small, sudden, (last[0], tuple(last[1]), tuple(last[2])) if last else None)


def _apart(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True))
