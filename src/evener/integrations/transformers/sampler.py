"""Order of samples as ``TrainingArguments`` ask for it, for ``Task(order=...)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from evener.data.sampler import Order
from evener.errors import ConfigurationError


class Sampling:
    """Lists the samples of an epoch in order.

    Args:
        strategy: ``random``, ``sequential`` or ``group_by_length``.
        size: Samples in the training set.
        listed: Samples per epoch; the others are left out.
        batch_size: Samples per global batch. With ``group_by_length``, these have about the same length.
        lengths: Length of each sample; used by ``group_by_length`` alone.
    """

    def __init__(
        self, strategy: str, size: int, listed: int, seed: int, batch_size: int, lengths: Sequence[int] = ()
    ) -> None:
        self._strategy, self._size, self.listed, self._seed = strategy, size, listed, seed
        self._batch_size, self._lengths = batch_size, lengths

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        return self._whole(epoch)[: self.listed]

    def _whole(self, epoch: int) -> NDArray[np.int64]:
        if self._strategy == "sequential":
            return np.arange(self._size)
        if self._strategy == "random":
            return Order(self._size, seed=self._seed).ids(epoch, 0, self._size)
        drawn = np.random.SeedSequence(self._seed, spawn_key=(epoch,)).generate_state(1, np.uint32)
        generator = torch.Generator().manual_seed(int(drawn[0]))
        found = get_length_grouped_indices(list(self._lengths), self._batch_size, generator=generator)
        return np.asarray(found, dtype=np.int64)


def sampling_of(
    args: TrainingArguments, dataset: Any, together: int, batch_size: int, processing_class: Any
) -> Sampling | None:
    """Returns the order that ``args`` ask for. Returns None if that is Evener's default order.

    Args:
        together: Samples of all ranks in one micro-batch. With ``dataloader_drop_last``, an incomplete one is dropped.
        batch_size: Samples per global batch.

    Raises:
        ConfigurationError: If no sample is left, or the lengths of samples are not known.
    """
    grouped = "group_by_length" if getattr(args, "group_by_length", False) else "random"
    strategy = str(getattr(args, "train_sampling_strategy", grouped))
    size = len(dataset)
    listed = size - size % together if args.dataloader_drop_last else size
    if not listed:
        raise ConfigurationError(
            f"dataloader_drop_last leaves nothing of {size} samples in batches of {together}: leave it out, or make "
            "batches smaller"
        )
    if strategy == "random" and listed == size and args.data_seed is None:
        return None
    seed = args.seed if args.data_seed is None else args.data_seed
    lengths = _lengths(args, dataset, processing_class) if strategy == "group_by_length" else ()
    return Sampling(strategy, size, listed, seed, batch_size, lengths)


def _lengths(args: TrainingArguments, dataset: Any, processing_class: Any) -> list[int]:
    column = args.length_column_name
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    named = getattr(processing_class, "model_input_names", None) or ["input_ids"]
    items = [dataset[index] for index in range(len(dataset))]
    if not all(isinstance(item, dict) and named[0] in item for item in items):
        raise ConfigurationError(
            f"train_sampling_strategy='group_by_length' needs the length of each sample: items that are dicts with "
            f"{named[0]}, or a column {column}"
        )
    return [len(item[named[0]]) for item in items]
