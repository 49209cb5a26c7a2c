"""Which parameters are trained, asked anew in every step: fine-tuning freezes and thaws layers in mid-run.

What sums gradients is set up for those that are trained at first, and goes on with them::

    frozen since    the rank gives zeros to the sum, and the gradient is forgotten
    thawed since    summed by itself before the update, when it is known that all ranks have thawed the same

Ranks tell each other with their row of a step which parameters they train (`changes`). One that finds a change waits
for the rows, so that it sums nothing that the others do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from evener.errors import ConfigurationError


class Trained:
    """The parameters of a model that require a gradient, at first and now.

    Args:
        names: Of all parameters.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self.first = [p for p in names if p.requires_grad]
        """Those that are trained at first."""
        self.frozen: list[nn.Parameter] = []
        """Those of them that no more are."""
        self.thawed: list[nn.Parameter] = []
        """Others that now are."""
        self._now = [p.requires_grad for p in names]

    def look(self, strategy: str, follows: bool, in_backward: bool = False) -> bool:
        """Takes in what is trained now; whether that has changed since the last look.

        Args:
            follows: Whether ``strategy`` can follow a change.
            in_backward: Whether parameters are updated in backward, which was set up for those of the beginning.

        Raises:
            ConfigurationError: If there is a change that cannot be followed.
        """
        before, self._now = self._now, [p.requires_grad for p in self._names]
        if before == self._now:
            return False
        first = set(self.first)
        self.frozen = [p for p in self.first if not p.requires_grad]
        self.thawed = [p for p in self._names if p.requires_grad and p not in first]
        if not follows or in_backward:
            who = "update_in_backward" if follows else f"strategy {strategy!r}"
            raise ConfigurationError(
                f"{who} cannot follow a change of requires_grad in mid-run: {in_short(self.changes)}. Set it in "
                "Task.model, and begin another run from this one's weights where it is to change; or use 'ddp'"
            )
        return True

    @property
    def changes(self) -> tuple[str, ...]:
        """What differs from the beginning, by name; the same on all ranks."""
        return (
            *(f"{self._names[p]} is frozen" for p in self.frozen),
            *(f"{self._names[p]} is thawed" for p in self.thawed),
        )

    @contextmanager
    def as_at_first(self) -> Iterator[None]:
        """Those that were frozen since can get a gradient within."""
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self.frozen:
                parameter.requires_grad_(False)


def check_trained_alike(changes: Sequence[tuple[str, ...]], step: int | None = None) -> None:
    """Raises ConfigurationError, on all ranks alike, if these changes, by rank, are not the same."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, one in enumerate(changes):
        ranks.setdefault(one, []).append(str(rank))
    if len(ranks) > 1:
        words = "; ".join(f"on rank {', '.join(those)} {in_short(one)}" for one, those in ranks.items())
        where = "" if step is None else f" in step {step}"
        raise ConfigurationError(
            f"the ranks train different parameters{where}: {words}. Change requires_grad on all ranks after the same "
            "step: an observer is told on rank 0 alone, unless it has `everywhere = True`. Checkpoints are from before"
        )


def in_short(changes: tuple[str, ...]) -> str:
    """The first few of ``changes``, and how many there are."""
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return f"{', '.join(changes[:3]) or 'all are trained as at first'}{more}"
