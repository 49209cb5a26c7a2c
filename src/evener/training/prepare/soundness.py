"""The check that gradients are finite before an update.

A device that runs behind the host has not computed them when the update is queued. There the check reads what was found
of the update before, so that the host waits for nothing. A weight that is no number makes the next loss one, so that a
run does not go on from it in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from evener.distributed.session import Session
from evener.errors import DivergenceError
from evener.hardware.async_read import Readout, is_late, read
from evener.strategies.learner import Learner


def runs_behind(session: Session) -> bool:
    """Returns True if this rank's device runs behind the host, so that numbers of a step are known after its end."""
    return is_late(session.device) and not session.mixed


class SoundnessCheck:
    """Checks the gradients of one preparation.

    Args:
        over_ranks: Returns the number of each rank, for that of this one. A collective call.
    """

    def __init__(self, over_ranks: Callable[[float], Sequence[float]]) -> None:
        self._over_ranks = over_ranks
        self._unread: tuple[int, list[Readout]] | None = None

    def check(self, learner: Learner, parameters: Iterable[nn.Parameter], step: int, divided: bool) -> None:
        """Checks the gradients before the update of step ``step``, or on a late device those before.

        Args:
            divided: True if a rank has parts of some. Then all ranks must call this together.

        Raises:
            DivergenceError: If one is not finite, on all ranks alike.
        """
        learner.look_at(p for p in parameters if p in learner.names)
        if not runs_behind(learner.session):
            self._judge(learner, learner.unsound.name(), step, divided)
            return
        before = self._unread
        self._unread = step, [read(place.tensor) for place in learner.unsound.found]
        learner.unsound.found.clear()
        number, found = before or (step, [])
        self._judge(learner, learner.unsound.name_of(found), number, divided)

    def settle(self, learner: Learner, divided: bool) -> None:
        """Checks the last update, too. Waits for the device."""
        number, found = self._unread or (0, [])
        self._unread = None
        if found:
            self._judge(learner, learner.unsound.name_of(found), number, divided)

    def _judge(self, learner: Learner, name: str | None, step: int, divided: bool) -> None:
        if divided:
            own = float(1 + learner.names_in_order.index(name)) if name else 0.0
            worst = int(max(self._over_ranks(own)))
            name = learner.names_in_order[worst - 1] if worst else None
        if name is not None:
            raise DivergenceError(
                f"the gradient of {name} is not finite before the update of step {step}: the run stops here. Try a "
                "lower learning rate or clip the gradients"
            )
