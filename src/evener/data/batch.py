"""A rank's part of one global batch, as it travels from the loader to the training step.

A rank may have nothing to compute in a micro-batch: its share is zero, or the last batch is smaller than the
number of ranks. It must still run every module, because normalisation and the exchange of gradients wait for
it. So it receives a *placeholder*, one real sample of weight 0, and nothing downstream has a special case:
sums are multiplied by the weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes between two normalisations."""

    inputs: Any
    """A tensor, or tensors nested in tuples, lists, dicts or dataclasses; the samples along dimension 0."""
    targets: Any
    """Nested in the same ways."""
    samples: Tensor
    """int64 ``(n,)``: ids of the samples in the data set, always on the CPU."""
    weight: int = 1
    """0 for a placeholder, which counts for nothing; else 1."""
    sequence: Any = None
    """An :class:`evener.nn.sequence_layout.DividedSequence` where other ranks have other positions of the same
    samples."""

    @property
    def size(self) -> int:
        """How many samples count."""
        return self.weight * len(self.samples)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """The same with inputs and targets on ``device``."""
        return self.map(lambda leaf: move(leaf, device, non_blocking))

    def rows(self, start: int, stop: int) -> MicroBatch:
        """The samples from ``start`` to ``stop``, which share its memory; every tensor has them along dimension 0."""
        part = self.map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf)
        return dataclasses.replace(part, samples=self.samples[start:stop])

    def map(self, function: Callable[[Any], Any]) -> MicroBatch:
        """The same with ``function`` applied to every leaf of inputs and targets."""
        return dataclasses.replace(
            self, inputs=map_leaves(function, self.inputs), targets=map_leaves(function, self.targets)
        )


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be read, and counts for nothing."""

    sample: int
    words: str
    """Which it is, and why."""


@dataclass(frozen=True)
class Batch:
    """A rank's part of a global batch, and what all ranks know of the whole."""

    epoch: int
    """From 0."""
    index: int
    """Which global batch of the epoch."""
    position: int
    """Samples of the epoch that came before it, over all ranks."""
    size: int
    """Samples over all ranks."""
    shares: tuple[int, ...]
    """Samples of each rank; they add up to ``size``."""
    micro_batches: list[MicroBatch]
    """At least one, and as many on every rank."""
    last: bool
    """Whether it is the last of its epoch."""
    skipped: tuple[Skipped, ...] = ()
    """Samples of this rank's share that are not in its micro-batches."""
    on_host: Batch | None = None
    """The same in the host's memory, where it was copied from there to a device."""

    @property
    def first_part(self) -> int:
        """The first part that has samples."""
        return next(part for part, share in enumerate(self.shares) if share)

    def without_samples(self) -> Batch:
        """What is known of it, when it has been computed: nobody keeps its samples alive."""
        place = (self.epoch, self.index, self.position, self.size, self.shares)
        return Batch(*place, [], self.last, self.skipped)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same with every micro-batch on ``device``."""
        moved = self.map(lambda leaf: move(leaf, device, non_blocking))
        return dataclasses.replace(moved, on_host=self)

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """The same with ``function`` applied to every leaf of all micro-batches."""
        return dataclasses.replace(self, micro_batches=[part.map(function) for part in self.micro_batches])


def move(leaf: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """``leaf`` on ``device`` if it is a tensor or an object with a ``to(device)`` of its own, else as is."""
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=non_blocking)
    return leaf.to(device) if hasattr(leaf, "to") else leaf


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree``, its types kept, with ``function`` applied to all that is not a tuple, list, mapping or dataclass.

    An object with a ``to`` of its own is a leaf, whatever else it is.
    """
    if isinstance(tree, Tensor) or hasattr(tree, "to"):
        return function(tree)
    if isinstance(tree, Mapping):
        return _like_mapping(tree, {key: map_leaves(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        return like_sequence(tree, [map_leaves(function, value) for value in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(
            tree, **{name: map_leaves(function, getattr(tree, name)) for name in fields}
        )
    return function(tree)


def like_sequence(original: Any, values: list[Any]) -> Any:
    """``values`` in a sequence of the type of ``original``, a tuple, named tuple or list."""
    kind = type(original)
    return kind(*values) if hasattr(original, "_fields") else kind(values)


def _like_mapping(original: Any, mapped: dict[Any, Any]) -> Any:
    """``mapped`` as the type of ``original``, or as a dict where that cannot be built from one."""
    try:
        return type(original)(mapped)
    except TypeError:
        return mapped
