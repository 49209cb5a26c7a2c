"""Steps of an optimizer of the user's own that updates weights as wholes, of which each rank has a piece.

Between its steps the optimizer has the pieces, whose gradients the loop clips and clears. Only while it steps, it has
whole weights in their places: at their owner with the gathered gradient, elsewhere without one, so that it leaves them
alone. So the state of a weight is at its owner::

    backward             gradients     of pieces, on all ranks
    optimizer.step()     a, c whole at rank 0          b whole at rank 1
    after it             weights       pieces, on all ranks
"""

from __future__ import annotations

import torch

from evener.components.optim.stand_ins import exchange_parameters
from evener.components.optim.whole_updates import Round, WholeUpdates


class WholeSteps:
    """Puts whole weights in the places of pieces while one optimizer steps. All ranks must call its methods together.

    Args:
        updates: The weights.
    """

    def __init__(self, updates: WholeUpdates) -> None:
        self._updates = updates
        self._now: Round | None = None

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Gathers weights and gradients at their owners, before the optimizer steps."""
        self._now = self._updates.fill()
        exchange_parameters(optimizer, self._updates.stand_ins)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the pieces of the updated weights back, after the step."""
        now, self._now = self._now, None
        self.put_back(optimizer)
        if now is not None:
            self._updates.give_back(now)

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer the pieces back."""
        exchange_parameters(optimizer, {made: piece for piece, made in self._updates.stand_ins.items()})
