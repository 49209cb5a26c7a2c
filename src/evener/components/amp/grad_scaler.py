"""Dynamic loss scaling for gradients in float16.

The smallest positive number of float16 is 6e-8; smaller gradients would become zero. So the loss is multiplied by a
scale before backward, and the gradients are divided by it afterwards. The scale is a power of two, so that this rounds
nothing. It is kept as large as possible: it doubles after 2000 steps without overflow, and is halved when a gradient
overflows; the update of that step is skipped (Micikevicius et al. 2018, arXiv:1710.03740; the constants are those of
``torch.amp.GradScaler``).

All ranks use the same scale, because they decide by the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST = 2.0**16
LEAST = 1.0
"""The minimum scale. If gradients overflow at this scale, a smaller scale would not help."""
GROWS_AFTER = 2000


class LossScale:
    """The factor by which the loss of the next step is multiplied."""

    def __init__(self) -> None:
        self.value = FIRST
        self._steps = 0
        """Steps without overflow since the last change of the scale."""

    def went_well(self) -> None:
        """Records a step without overflow."""
        self._steps += 1
        if self._steps == GROWS_AFTER:
            self.value, self._steps = self.value * 2, 0

    def overflowed(self) -> bool:
        """Records an overflow, and halves the scale. Returns False if the scale is already minimal and not the
        cause."""
        if self.value <= LEAST:
            return False
        self.value, self._steps = self.value / 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"scale": self.value, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from :meth:`state_dict`."""
        self.value, self._steps = float(state["scale"]), int(state["steps"])
