"""Skips samples that cannot be read: prints each on its rank at once, counts them over all ranks, and limits them.

The mean stays exact: a skipped sample adds neither to the total nor to the count, whichever rank reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evener.core.config.run_config import RunConfig
from evener.core.records import SkippedRecord
from evener.core.stdio import unheard
from evener.core.text import printable
from evener.data.batch import Batch
from evener.distributed.session import Session
from evener.errors import ConfigurationError, DataError
from evener.strategies.learner import Learner
from evener.training.step.step import Step

MOST = 0.1
"""Largest part of an epoch's samples that may be skipped."""
_SHOWN = 5
"""Number of skipped samples that a rank prints."""


def check_skipping(config: RunConfig, learner: Learner) -> bool:
    """Returns True if unreadable samples are skipped.

    Raises:
        ConfigurationError: If several ranks read the same samples, because one might read what another cannot.
    """
    skips = config.on_bad_sample == "skip"
    if skips and not learner.data.is_whole:
        raise ConfigurationError(
            f"strategy {learner.name!r} gives several ranks the same samples, which might not skip the same: with it "
            "on_bad_sample must be stop; leave out in the data set what cannot be read"
        )
    return skips


class Announcer:
    """Prints the first samples that a rank skips to standard error."""

    def __init__(self, rank: int) -> None:
        self._rank, self._told = rank, 0

    def tell(self, batch: Batch) -> None:
        for skipped in batch.skipped[: max(0, _SHOWN - self._told)]:
            print(
                f"evener: rank {self._rank} skips {printable(skipped.words)}",
                file=unheard(sys.stderr),
                flush=True,
            )
        if self._told < _SHOWN <= self._told + len(batch.skipped):
            print(f"evener: rank {self._rank} tells of no further ones", file=unheard(sys.stderr), flush=True)
        self._told += len(batch.skipped)


class Skips:
    """Counts and limits the skipped samples of each epoch.

    Args:
        size: Samples of an epoch; None if unknown.
    """

    def __init__(self, size: int | None, session: Session) -> None:
        self._size, self._session = size, session
        self._announcer = Announcer(session.rank)
        self._epoch, self._counts = -1, dict[int, int]()
        """The number of skipped samples by batch: a run that falls back to a checkpoint takes batches again."""
        self._own: dict[int, dict[str, object]] = {}

    def read(self, batch: Batch) -> None:
        """Records the samples that were skipped in a batch that this rank has read."""
        self._announcer.tell(batch)
        rank = self._session.rank
        self._own |= {s.sample: {"rank": rank, "sample": s.sample, "why": s.words} for s in batch.skipped}

    def observe(self, step: Step) -> None:
        """Counts the skipped samples of a step, once all ranks know them.

        Raises:
            DataError: If too many are skipped; on all ranks in the same step.
        """
        if step.batch.epoch != self._epoch:
            self._epoch, self._counts = step.batch.epoch, {}
        self._counts[step.batch.index] = step.skipped
        count = sum(self._counts.values()) if step.skipped else 0
        if self._size is not None and count > MOST * self._size:
            own = f"; the last on this rank is {[*self._own.values()][-1]['why']}" if self._own else ""
            raise DataError(
                f"{count} of the {self._size} samples of epoch {self._epoch + 1} could not be read, more than "
                f"{MOST:.0%}{own}. Repair the data, or leave these samples out of the data set"
            )

    def record(self, step: int, epoch: int) -> Sequence[SkippedRecord]:
        """Returns a record of all ranks' skipped samples since the last call, if there are any. A collective call."""
        own, self._own = [*self._own.values()], {}
        samples = [one for of_rank in self._session.control.gather_objects(own) for one in of_rank]
        return [SkippedRecord(step, epoch, samples)] if samples else []
