"""The check that gradients are finite before an update.

A device that runs behind the host has not computed them when the update is queued. There it is told of an update with
the next, so that the host waits for nothing. A weight that is no number makes the next loss one, so that a run does not
go on from it in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from evener.errors import DivergenceError
from evener.strategies.learner import Learner
from evener.training.prepare.late_checks import LateChecks


class SoundnessCheck:
    """Checks the gradients of one preparation.

    Args:
        over_ranks: Returns the number of each rank, for that of this one. A collective call.
    """

    def __init__(self, over_ranks: Callable[[float], Sequence[float]], later: LateChecks) -> None:
        self._over_ranks, self._later, self._of_losses = over_ranks, later.apart(), later
        self._found: tuple[int, str | None] = (0, None)
        """An update that the ranks have not compared yet, and the name of a gradient that is not finite, or None."""
        self._is_open = False

    def check(self, learner: Learner, parameters: Iterable[nn.Parameter], step: int, divided: bool) -> None:
        """Checks the gradients before the update of step ``step``, or on a late device those before.

        Args:
            divided: True if a rank has parts of some. Then all ranks must call this together.

        Raises:
            DivergenceError: If one is not finite, on all ranks alike.
        """

        def known(places: list[float]) -> None:
            name = learner.unsound.name_of(places)
            if not divided:
                self._judge(step, name)
            elif self._found[1] is None:
                self._found = step, name

        self._of_losses.turn_in_step()  # the losses of an update are known before it is judged
        learner.unsound.found.clear()  # of passes whose update the loop may have left out
        learner.look_at(p for p in parameters if p in learner.names)
        found = [place.tensor for place in learner.unsound.found]
        self._later.check(known, *found)
        self._later.turn()
        self._is_open = divided and learner.session.runs_behind
        if divided:
            self._compare(learner)

    def settle(self, learner: Learner) -> None:
        """Checks the last update, too. Waits for the device. A collective call."""
        self._later.settle()
        if self._is_open:
            self._is_open = False
            self._compare(learner)

    def _compare(self, learner: Learner) -> None:
        (step, name), self._found = self._found, (self._found[0], None)
        own = float(1 + learner.names_in_order.index(name)) if name else 0.0
        worst = int(max(self._over_ranks(own)))
        self._judge(step, learner.names_in_order[worst - 1] if worst else None)

    def _judge(self, step: int, name: str | None) -> None:
        known = self._of_losses.bad_losses
        losses = [known.pop(told) for told in sorted(known) if told <= step]
        if name is not None:
            cause = f"{losses[-1]}, and " if losses else ""
            raise DivergenceError(
                f"{cause}the gradient of {name} is not finite before the update of step {step}: the run stops here. "
                "Try a lower learning rate or clip the gradients. To leave out such updates, let the loop ask before "
                "each: if loss.isfinite()"
            )
