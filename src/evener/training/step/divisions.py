"""Checks that all ranks divide each batch in the same way, by a code that each of them sends with a step.

Otherwise some samples would count twice, and others never. Ranks that pad their samples to lengths of their own would
divide a mean over all elements by another number than one device does.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from evener.balance.base import shares_in_words
from evener.components.trainable import check_trained_alike
from evener.data.batch import Batch, MicroBatch
from evener.distributed.hosts import all_gather
from evener.errors import DataError, LossError, ShareError
from evener.training.step.step import Step


def code_of(batch: Batch, upcoming: Batch | None, changes: tuple[str, ...] = ()) -> float:
    """Returns a code of the shares and costs of the batches, and of changes of the trained parameters."""
    code = zlib.crc32("".join(changes).encode(), _code_of_division(batch))
    return float(code if upcoming is None else _code_of_division(upcoming, code))


def _code_of_division(batch: Batch, code: int = 0) -> int:
    code = zlib.crc32(array("q", batch.shares).tobytes(), code)
    return zlib.crc32(array("d", batch.costs).tobytes(), code) if batch.costs else code


def width_of(micros: Sequence[MicroBatch]) -> float:
    """Returns the number of elements of a sample among the targets of a rank; 0 if it has no whole samples, or targets
    that are no tensor, which a mean over elements refuses."""
    whole = [each.targets for each in micros if each.weight and each.sequence is None]
    shapes = [targets.shape or (1,) for targets in whole if isinstance(targets, Tensor)]
    return float(max((math.prod(shape) // max(1, shape[0]) for shape in shapes), default=0))


def check_widths(widths: Sequence[float]) -> None:
    """Checks the number of elements of a sample in a mean over all of them; 0 if a rank's mean is another one.

    Raises:
        LossError: If it differs between the ranks.
    """
    if len({*widths} - {0.0}) > 1:
        found = ", ".join(f"{width:.0f} on rank {rank}" for rank, width in enumerate(widths) if width)
        raise LossError(_PADDED.format(found=found))


_PADDED = (
    "a loss or metric is a mean over all elements, and a sample has {found}: the collate function fills up to the "
    "longest sample of each rank. What is filled in counts, and on one device it goes up to the longest sample of the "
    "batch. Fill up to one length in the data set, or take the mean over what is not filled in alone: in a task by an "
    "evener.loss with a total and a count of that, in a loop by a function that computes (each * mask).sum() / "
    "mask.sum()"
)


def check_divisions(
    codes: Sequence[float], step: Step, upcoming: Batch | None, world: ProcessGroup | None
) -> None:
    """Checks the codes of all ranks. A collective call if they differ.

    Args:
        codes: What :func:`code_of` returned on each rank, or the least and the greatest.
        upcoming: The next batch, if its division is in the codes.
        world: The group of all ranks; None on a single one.

    Raises:
        ConfigurationError: If the ranks train different parameters.
        DataError: If they find different costs.
        ShareError: If they take different shares.
    """
    if len(set(codes)) == 1:
        return
    own = [(batch.shares, batch.costs) for batch in (step.batch, upcoming) if batch is not None]
    said = [(own, step.changes)]
    said = said if world is None else all_gather(said[0], world)
    check_trained_alike([changes for _, changes in said], step.number)
    of_all = [shares for shares, _ in said]
    at = next((at for at in range(len(own)) if any(one[at] != own[at] for one in of_all)), 0)
    totals = [sum(one[at][1]) for one in of_all]
    if not math.isclose(min(totals), max(totals), rel_tol=1e-12):  # sums of other cuts round otherwise
        words = _by_ranks([f"{total:.12g}" for total in totals])
        raise DataError(
            f"the ranks find different costs of the batch of step {step.number + at}: {words}. Task.cost must be "
            "the same on all ranks: let it depend on nothing but the index. Checkpoints are from before"
        )
    words = _by_ranks([shares_in_words(one[at][0]) for one in of_all])
    raise ShareError(
        f"the ranks divide the batch of step {step.number + at} in different ways: {words}. A balancer has to come "
        "to the same shares on every rank, by what it is given and observes alone: not by its rank, a clock, or "
        "random numbers of its own. Checkpoints are from before"
    )


def _by_ranks(words: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, each in enumerate(words):
        ranks.setdefault(each, []).append(str(rank))
    return "; ".join(f"{each} on rank {', '.join(those)}" for each, those in ranks.items())
