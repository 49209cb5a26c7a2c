"""Finds out how many terms a mean has that the loop or the model computed itself, where nothing is said of it.

A mean over samples is weighed by the samples of each rank. One over the words that are not padding is not: on one
device a sample with more words counts for more. Where the graph of a mean tells the number of its terms, the mean is
weighed by that. Where it tells that the number is another one for each rank, and not which one counts, the loop is
refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch import Tensor

from evener.errors import LossError
from evener.torch_internals.mean_terms import MeanTerms, Number, mean_terms
from evener.training.prepare.current_batch import CurrentBatch
from evener.training.prepare.rank_checks import Exchange, check_marks

_MOST = 3
"""Number of means and divisors that are compared. An exchange takes eight numbers, and five are sent besides."""
_CLOSE = 1e-6
_WAY_OUT = (
    "Say how many: evener.global_mean(value, count), with this rank's number; of a sum of several means, each one with "
    "its own. Or give evener.prepare the function that computes the loss"
)


class TermsOfMeans:
    """What the means of one loop tell. It compares the ranks' numbers in the calls 1, 2, 4, 8 and so on."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._calls = exchange, 0
        self._differs = self._is_told = False

    def number(self, value: Tensor, batch: CurrentBatch) -> Number | None:
        """Returns how many terms the mean ``value`` has on this rank. None if nothing is known of it, so that it is one
        over samples. A collective call.

        Raises:
            LossError: On all ranks, if each rank's mean is over, or divided by, a number of its own, and it is not
                certain which of several numbers weighs it.

        Warns:
            UserWarning: If there is no graph, and means with one had such numbers.
        """
        found = mean_terms(value) if value.requires_grad else MeanTerms([], [], 1)
        self._calls += 1
        if not self._calls & (self._calls - 1):
            self._compare(batch, found)
        if self._differs and not value.requires_grad and not self._is_told:
            self._is_told = True
            warnings.warn(
                "evener.global_mean of a mean without a graph, as in evaluation, weighs it by samples. In training the "
                f"same loop had means over terms whose number differs from sample to sample. {_WAY_OUT}",
                stacklevel=4,
            )
        return found.number

    def _compare(self, batch: CurrentBatch, found: MeanTerms) -> None:
        numbers = [_told(each) for each in (*found.means[:_MOST], *found.divisors[:_MOST])][:_MOST]
        kinds = (len(found.means[:_MOST]), len(numbers), found.number is not None)
        rows = self._exchange("the loss", batch.agreed, batch.samples, *kinds, *numbers)
        check_marks([row[0] for row in rows])
        rows = [row for row in rows if row[1]]
        if any(row[2:5] != rows[0][2:5] for row in rows):
            return
        is_one = found.number is not None and all(len({*row[5 : 5 + kinds[0]]}) == 1 for row in rows)
        for at in range(len(numbers)):
            of_ranks = [row[5 + at] for row in rows]
            is_mean = at < kinds[0]
            if not _weighs_like(of_ranks, [row[1] for row in rows]) and (is_mean or len(set(of_ranks)) > 1):
                self._differs = True
                if not is_one:
                    raise LossError(_refusal(is_mean, of_ranks, [int(row[1]) for row in rows]))


def _told(number: Number) -> float:
    return 0.0 if isinstance(number, Tensor) and (number.is_meta or number.numel() != 1) else float(number)


def _weighs_like(numbers: Sequence[float], samples: Sequence[float]) -> bool:
    """Returns True if each rank has as many terms for each of its samples."""
    pairs = list(zip(numbers, samples, strict=True))
    number, of = pairs[0]
    return all(math.isclose(each * of, number * own, rel_tol=_CLOSE) for each, own in pairs)


def _refusal(is_mean: bool, numbers: Sequence[float], samples: Sequence[int]) -> str:
    what = "a part of it is a mean over" if is_mean else "a sum in it is divided by"
    return (
        f"evener.global_mean would weigh this number by samples, and {what} {_listed(numbers)} on the ranks, which "
        f"have {_listed(samples)} samples: samples with more terms count for more on one device. {_WAY_OUT}"
    )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
