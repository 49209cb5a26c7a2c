"""Checks that a data set returns the same sample for the same index, on every rank and at every reading.

Otherwise a run on several ranks silently trains on other data than a run on one. Each rank reads the same few indices
twice, and the ranks compare digests of the samples::

    rank 0   [a b c ...]  [a b c ...]   second reading: another epoch
    rank 1   [a b c ...]  [a x c ...]   b is another sample here

Random augmentation draws on purpose, and may be allowed: then the generators of torch, NumPy and ``random`` are seeded
with the index before each reading, and any remaining difference has another cause. The generators are restored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from evener.core.config.run_config import RunConfig
from evener.data.fetch import failure
from evener.data.fingerprint import digest_if_any, generators_kept
from evener.data.sample_names import called
from evener.data.sampler import Order
from evener.errors import ConfigurationError, DataError, InterruptedRunError
from evener.strategies.learner import Learner

SAMPLES = 16
"""Number of indices; each is read twice on every rank."""

Readings = Sequence[Sequence[str]]
"""For each reading of a rank, the digest of each sample."""


def check_data(config: RunConfig, learner: Learner) -> None:
    """Compares some samples of the training and the evaluation set, if the settings ask for it. A collective call.

    A run that is exact in bits seeds the generators for each grain. So it is always checked that a sample depends on
    nothing else.

    Raises:
        DataError: If a sample is not the same on all ranks or at both readings, on all ranks alike.
        ConfigurationError: If the data set has no indices.
    """
    how = config.check_data or ("augmented" if config.exact == "bits" else None)
    if how is None:
        return
    task = learner.task
    for name, dataset in (("training set", task.train), ("evaluation set", task.evaluate)):
        if dataset is not None and (config.check_data or not isinstance(dataset, IterableDataset)):
            skips = config.check_data is None and config.on_bad_sample == "skip"
            _check(dataset, name, config.seed, how == "augmented", skips, learner)


def _check(dataset: Any, name: str, seed: int, augmented: bool, skips: bool, learner: Learner) -> None:
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            f"check_data: the {name} is iterable, and has no indices that could be read twice"
        )
    order = Order(len(dataset), seed=seed)
    indices = sorted(order.ids(0, 0, min(SAMPLES, order.size)).tolist())
    control, shared = learner.session.control, learner.task.partition != "sample"
    found = control.gather_objects(_readings(dataset, name, indices, augmented, skips))
    different = difference(found, shared)
    if different is None:
        return
    place, words = different
    drawn = (
        not augmented
        and difference(control.gather_objects(_readings(dataset, name, indices, True, skips)), shared) is None
    )
    raise DataError(
        f"the {name} does not give the same sample for one index: {called(dataset, indices[place])} {words}. "
        + (_DRAWN if drawn else _OTHERWISE)
    )


_DRAWN = (
    "It draws from the generators of torch, NumPy or random, as augmentation does: draw from the index, so that the "
    "division of the work does not matter, or allow it with --check-data augmented"
)
_OTHERWISE = "Let a sample depend on nothing but its index: on no clock, no state, no order of files, no rank"


def difference(found: Sequence[Readings], shared: bool = True) -> tuple[int, str] | None:
    """Returns the first position at which readings differ, and a description. Returns None if all are the same.

    Args:
        found: The readings of each rank.
        shared: Whether all ranks read the same data set.
    """
    for rank, (first, second) in enumerate(found):
        for place, digests in enumerate(zip(first, second, strict=True)):
            if digests[0] != digests[1]:
                return place, f"is another one when rank {rank} reads it again"
    for rank, (first, _) in enumerate(found if shared else ()):
        for place, digests in enumerate(zip(found[0][0], first, strict=True)):
            if digests[0] != digests[1]:
                return place, f"is another one on rank {rank} than on rank 0"
    return None


def _readings(dataset: Any, name: str, indices: Sequence[int], seeded: bool, skips: bool) -> Readings:
    with generators_kept():
        return [[_digest(dataset, name, index, seeded, skips) for index in indices] for _ in range(2)]


def _digest(dataset: Any, name: str, index: int, seeded: bool, skips: bool) -> str:
    """Returns the digest of a sample; a text if it cannot be read and the run ``skips`` such samples."""
    if seeded:
        torch.manual_seed(index)
        np.random.seed(index)  # a user's data set may draw from it
        random.seed(index)
    try:
        item = dataset[index]
    except InterruptedRunError:
        raise
    except Exception as error:
        if skips:
            return f"{type(error).__name__} instead of a sample"
        raise DataError(failure(error, f"reading {called(dataset, index)} of the {name}").message) from error
    if digest := digest_if_any(item):
        return digest
    raise DataError(
        f"{called(dataset, index)} of the {name} cannot be compared with that of other ranks: it holds what cannot be "
        "pickled. Let samples consist of tensors, numbers and texts"
    )
