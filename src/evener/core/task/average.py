"""Averages of the weights over the steps of a run, as ``Task.average``: EMA, SWA, or a function of the user's own.

The functions are those that ``torch.optim.swa_utils.AveragedModel`` takes as ``multi_avg_fn``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from evener.core.plugins import kind_of
from evener.errors import TaskError

UpdateAverages = Callable[[Any, Any, Any], Any]
"""Takes a list of averages, which it changes in place, the list of the weights of now, and how often was averaged."""


@dataclass(frozen=True)
class Average:
    """An average of the weights, kept beside them. It changes nothing in the training.

    The first update copies the weights, and each further one calls ``update``. Floating-point buffers, such as
    BatchNorm's statistics, are averaged as the weights are.

    Raises:
        TaskError: If a field has a wrong value, or ``update`` does not compute each element from that element alone.
    """

    update: UpdateAverages
    """Function ``(averages, weights, number) -> None`` of two lists of tensors, such as a ``multi_avg_fn`` of
    ``torch.optim.swa_utils``. A rank has a part of the elements, so that each must be computed from itself alone."""
    start: int = 0
    """The number of the first updates of the weights that are left out."""
    every: int = 1
    """The number of updates of the weights, counted from ``start``, from one that is averaged to the next."""
    instead: bool = False
    """True if evaluations and predictions use the average instead of the weights. Otherwise evaluations use both, and
    the metrics of the average are called ``average.loss`` and so on."""
    name: str = "average"
    """A description, for the summary of a run."""

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TaskError(
                    f"{name} of an average is {value!r}; it must be a whole number of at least {least}"
                )
        if not callable(self.update):
            raise TaskError(
                f"update of an average is {kind_of(self.update)}, not a function; give one of (averages, weights, "
                "number), as torch.optim.swa_utils has them"
            )
        _check_update(self.update)

    @property
    def words(self) -> str:
        """A description of the average and of the updates that it is of."""
        of = f", one of {self.every:,} updates" if self.every > 1 else ""
        return f"{self.name}{of}{f' after the first {self.start:,}' if self.start else ''}"


def ema(decay: float = 0.999, *, start: int = 0, every: int = 1, instead: bool = False) -> Average:
    """Returns an exponential moving average: each update moves it by ``1 - decay`` of the way to the weights.

    Args:
        decay: At least 0 and below 1.
        start, every, instead: See :class:`Average`.

    Raises:
        TaskError: If an argument has a wrong value.
    """
    if isinstance(decay, bool) or not isinstance(decay, float | int) or not 0 <= decay < 1:
        raise TaskError(f"the decay of an average is {decay!r}; it must be at least 0 and below 1")
    name = f"exponential moving average, decay {decay:g}"
    update: UpdateAverages = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return Average(update, start, every, instead, name)


def swa(*, start: int = 0, every: int = 1, instead: bool = False) -> Average:
    """Returns the mean of the weights after each averaged update (stochastic weight averaging, arXiv:1803.05407).

    Args:
        start, every, instead: See :class:`Average`.

    Raises:
        TaskError: If an argument has a wrong value.
    """
    update: UpdateAverages = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
    return Average(update, start, every, instead, "mean of the weights")


def as_average(given: Any) -> Average | None:
    """Returns ``given``, or the average of a function. None stays None.

    Raises:
        TaskError: If it is neither.
    """
    if given is None or isinstance(given, Average):
        return given
    if callable(given) and given not in (ema, swa):
        return Average(given)
    what = f"{given.__name__} itself" if given in (ema, swa) else kind_of(given)
    raise TaskError(
        f"Task.average is {what}, not an average; give evener.ema(0.999), evener.swa(start=...) or a function of "
        "(averages, weights, number), as torch.optim.swa_utils has them"
    )


def _check_update(update: UpdateAverages) -> None:
    """Calls ``update`` with a list of numbers, and with parts of it: the results must be the same."""
    averages, weights = (
        torch.linspace(start, stop, 6, dtype=torch.float64) for start, stop in ((-1, 2), (3, -2))
    )
    whole, parts = averages.clone(), [averages[:2].clone(), averages[2:].clone()]
    try:
        update([whole], [weights.clone()], 2)
        for part, of_part in zip(parts, (weights[:2], weights[2:]), strict=True):
            update([part], [of_part.clone()], 2)
    except Exception as error:
        raise TaskError(
            f"the update of an average cannot be called with two lists of tensors and a number: "
            f"{type(error).__name__}: {error}"
        ) from error
    if torch.equal(whole, averages):
        raise TaskError("the update of an average left it as it was; it must change the averages in place")
    if not torch.allclose(torch.cat(parts), whole, rtol=1e-9, atol=0):
        raise TaskError(
            "the update of an average looks at several elements together, and a rank may hold a part of them: compute "
            "each average from its own element alone"
        )
