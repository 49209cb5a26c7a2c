"""Tracks which parameters are trained in each step, because fine-tuning may freeze and unfreeze layers in mid-run.

Gradient synchronization is set up for the parameters that are trained at the start, and keeps to them::

    frozen since    the rank contributes zeros to the sum, and drops the gradient
    thawed since    summed separately before the update, once all ranks are known to have thawed the same

In every step the ranks exchange which parameters they train (`changes`). A rank with a change waits for this message,
so that it sums nothing that other ranks do not sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from evener.errors import ConfigurationError


class TrainableParameters:
    """The parameters of a model that require a gradient, at the start and now.

    Args:
        names: The names of all parameters.
        updated: Those that the optimizer updates.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], updated: Collection[nn.Parameter]) -> None:
        self._names = names
        self._never_updated = [p for p in names if p not in updated]
        self.first = [p for p in names if p.requires_grad]
        """The parameters that are trained at the start."""
        self.frozen: list[nn.Parameter] = []
        """Parameters of ``first`` that are frozen now."""
        self.thawed: list[nn.Parameter] = []
        """Parameters not in ``first`` that are trained now."""
        self._now = [p.requires_grad for p in names]

    def update(self, strategy: str, follows: bool, in_backward: bool = False) -> bool:
        """Updates the lists. Returns True if the trained parameters have changed since the last call.

        Args:
            follows: True if ``strategy`` supports a change.
            in_backward: True if parameters are updated in backward, which does not support a change.

        Raises:
            ConfigurationError: If there is a change that is not supported.
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

    def clear_never_updated(self) -> None:
        """Clears the gradients of the parameters that the optimizer does not hold, which no update clears. They would
        add up, and be summed over the ranks once more, in each step, and count in the norm by which all are clipped."""
        for parameter in self._never_updated:
            parameter.grad = None

    @property
    def changes(self) -> tuple[str, ...]:
        """The differences from the start, one text for each parameter. They must be the same on all ranks."""
        if not (self.frozen or self.thawed):
            return ()
        return (
            *(f"{self._names[p]} is frozen" for p in self.frozen),
            *(f"{self._names[p]} is thawed" for p in self.thawed),
        )

    @contextmanager
    def as_at_first(self) -> Iterator[None]:
        """Lets the frozen parameters get gradients within the block."""
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self.frozen:
                parameter.requires_grad_(False)


def check_trained_alike(changes: Sequence[tuple[str, ...]], step: int | None = None) -> None:
    """Raises ConfigurationError if ``changes``, which has an entry for each rank, differs between ranks."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, one in enumerate(changes):
        ranks.setdefault(one, []).append(str(rank))
    if len(ranks) > 1:
        listed = "; ".join(f"on rank {', '.join(those)} {in_short(one)}" for one, those in ranks.items())
        where = "" if step is None else f" in step {step}"
        raise ConfigurationError(
            f"the ranks train different parameters{where}: {listed}. Change requires_grad on all ranks after the same "
            "step: an observer is told on rank 0 alone, unless it has `everywhere = True`. Checkpoints are from before"
        )


def in_short(changes: tuple[str, ...]) -> str:
    """Returns the first few changes, and the number of the others, as a text."""
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return f"{', '.join(changes[:3]) or 'all are trained as at first'}{more}"
