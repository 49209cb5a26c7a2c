"""The scale of the loss, where gradients pass through float16.

The smallest numbers of float16 are 6e-8; smaller gradients would be zero. So the loss is multiplied before backward and
the gradients are divided afterwards, by a power of two, which rounds nothing. The scale is as large as it can be: it
doubles after many steps in which no gradient overflowed, and is halved when one did, a step whose update is left out
(Micikevicius et al. 2018, arXiv:1710.03740; the numbers are those of ``torch.amp.GradScaler``).

All ranks decide alike, by what all of them have told of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST = 2.0**16
LEAST = 1.0
"""Gradients that overflow without a scale are no matter of the scale any more."""
GROWS_AFTER = 2000


class LossScale:
    """By what the loss of the next step is multiplied."""

    def __init__(self) -> None:
        self.value = FIRST
        self._steps = 0
        """Without an overflow, since the scale was last changed."""

    def went_well(self) -> None:
        """No gradient of the step overflowed."""
        self._steps += 1
        if self._steps == GROWS_AFTER:
            self.value, self._steps = self.value * 2, 0

    def overflowed(self) -> bool:
        """A gradient of the step did; False if that is not the scale's fault."""
        if self.value <= LEAST:
            return False
        self.value, self._steps = self.value / 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on from."""
        return {"scale": self.value, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.value, self._steps = float(state["scale"]), int(state["steps"])
