"""A rank's part of one global batch: the data class that the loader gives to the training step.

A rank may have no sample in a micro-batch: its share is zero, or the last batch is smaller than the number of
ranks. The rank must still run every module, because normalisation and gradient synchronization wait for it. So it
receives a *placeholder*: one real sample of weight 0. The training step multiplies its sums by the weight and needs
no special case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from evener.data.audits import AuditedBlock
from evener.hardware.async_copy import move_tensor

T = TypeVar("T")


@dataclass  # to make a frozen one takes four times as long, in every step
class MicroBatch:
    """One rank's samples of a micro-batch, for one forward and backward pass."""

    inputs: Any
    """A tensor, or tensors nested in tuples, lists, dicts or dataclasses. Dimension 0 counts the samples."""
    targets: Any
    """A tensor or nested tensors, like ``inputs``."""
    samples: Tensor
    """int64 ``(n,)``: ids of the samples in the data set, always on the CPU."""
    weight: int = 1
    """0 for a placeholder, which must not affect the result; else 1."""
    ends_block: bool = True
    """False for a grain that is not the last one of its block, in a run that is exact in bits."""
    position: int | None = None
    """The position in the epoch of the first sample of a grain, in a run that is exact in bits; else None."""
    audit: int | None = None
    """The number of the grain's block in its batch if another rank computes it too, to compare; else None."""
    sequence: Any = None
    """An :class:`evener.nn.sequence_layout.DividedSequence` if the sequences are divided over ranks, else None."""

    @property
    def size(self) -> int:
        """The number of samples; 0 for a placeholder."""
        return self.weight * len(self.samples)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Returns a copy with inputs and targets on ``device``; see :func:`move`."""
        return self.map(lambda leaf: move(leaf, device, non_blocking))

    def rows(self, start: int, stop: int) -> MicroBatch:
        """Returns the samples ``[start, stop)`` as views: every tensor is sliced along dimension 0."""
        part = self.map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf)
        return with_fields(part, samples=self.samples[start:stop])

    def map(self, function: Callable[[Any], Any]) -> MicroBatch:
        """Returns a copy with ``function`` applied to every leaf of inputs and targets."""
        inputs, targets = map_leaves(function, self.inputs), map_leaves(function, self.targets)
        return with_fields(self, inputs=inputs, targets=targets)


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be read and is left out of the batch."""

    sample: int
    words: str
    """A message that names the sample and the error."""


@dataclass  # as above
class Batch:
    """A rank's part of a global batch, with the position and size of the global batch."""

    epoch: int
    """The epoch, counted from 0."""
    index: int
    """The number of the global batch in its epoch, from 0."""
    position: int
    """The number of samples of the epoch before this batch, over all ranks."""
    size: int
    """The number of samples over all ranks."""
    shares: tuple[int, ...]
    """The number of samples of each rank. They add up to ``size``."""
    micro_batches: list[MicroBatch]
    """This rank's micro-batches: at least one, and the same number on every rank, unless the run is exact in bits."""
    last: bool
    """True for the last batch of its epoch."""
    skipped: tuple[Skipped, ...] = ()
    """Samples of this rank's share that could not be read and are in none of its micro-batches."""
    on_host: Batch | None = None
    """The batch in host memory that this one was copied from; None if it was not copied."""
    costs: tuple[float, ...] = ()
    """The cost of each rank's samples, by ``Task.cost``; empty if the task gives no costs."""
    audited: tuple[AuditedBlock, ...] = ()
    """The blocks that two ranks compute, alike on all ranks."""
    audits: Sequence[MicroBatch] = ()
    """The grains of other ranks' blocks that this rank computes to compare; they count for nothing."""

    @property
    def first_part(self) -> int:
        """The index in ``shares`` of the first rank that has samples."""
        return next(part for part, share in enumerate(self.shares) if share)

    def without_samples(self) -> Batch:
        """Returns the batch without its micro-batches, for use after the step: the samples can be freed."""
        place = (self.epoch, self.index, self.position, self.size, self.shares)
        return Batch(*place, [], self.last, self.skipped, costs=self.costs)

    def to(self, device: torch.device | str, convert: Callable[[Any], Any] | None = None) -> Batch:
        """Returns a copy with every micro-batch on ``device``, and there every leaf converted. ``on_host`` of the copy
        is this batch."""

        def moved(leaf: Any) -> Any:
            there = move(leaf, device)
            return there if convert is None else convert(there)

        return self.moved(moved)

    def moved(self, move: Callable[[Any], Any]) -> Batch:
        """Returns a copy with every leaf of all micro-batches moved. ``on_host`` of the copy is this batch."""
        return self._mapped(move, on_host=self)

    def cut(self, piece: Callable[[MicroBatch], MicroBatch]) -> Batch:
        """Returns the batch with ``piece`` of each micro-batch. ``on_host`` is cut too."""
        host = None if self.on_host is None else self.on_host.cut(piece)
        return with_fields(self, micro_batches=[piece(micro) for micro in self.micro_batches], on_host=host)

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """Returns a copy with ``function`` applied to every leaf of all micro-batches."""
        return self._mapped(function, on_host=self.on_host)

    def _mapped(self, function: Callable[[Any], Any], on_host: Batch | None) -> Batch:
        micro_batches = [part.map(function) for part in self.micro_batches]
        audits = [part.map(function) for part in self.audits] if self.audits else ()
        return with_fields(self, micro_batches=micro_batches, audits=audits, on_host=on_host)


def with_fields(given: T, **fields: Any) -> T:
    """Does the same as ``dataclasses.replace`` in a fifth of the time, for data classes of this module."""
    made = object.__new__(type(given))
    made.__dict__.update(given.__dict__, **fields)
    return made


def move(leaf: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Moves ``leaf`` to ``device`` if it is a tensor or has a method ``to(device)``; else returns it unchanged. With
    ``non_blocking`` the host waits for copies to itself alone."""
    if isinstance(leaf, Tensor):
        return move_tensor(leaf, torch.device(device)) if non_blocking else leaf.to(device)
    return leaf.to(device) if has_to(leaf) else leaf


def has_to(leaf: Any) -> bool:
    """Returns True if ``leaf`` has a method ``to``."""
    try:
        return hasattr(leaf, "to")
    except KeyError:  # a dict whose attributes are its entries
        return False


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies ``function`` to every leaf of nested tuples, lists, mappings and dataclasses, and keeps their types.

    A tensor or an object with a method ``to`` is a leaf, even if it is one of these containers.
    """
    if isinstance(tree, Tensor) or has_to(tree):
        return function(tree)
    if isinstance(tree, Mapping):
        return like_mapping(tree, {key: map_leaves(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        return like_sequence(tree, [map_leaves(function, value) for value in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(
            tree, **{name: map_leaves(function, getattr(tree, name)) for name in fields}
        )
    return function(tree)


def parts_of(tree: Any) -> list[Any]:
    """Returns the parts of a tuple, list, mapping or dataclass that :func:`map_leaves` enters; none of a leaf."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, tuple | list):
        return list(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init]
    return []


def detached(leaf: Any) -> Any:
    """Returns a tensor detached from its graph, and anything else unchanged."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def cloned(leaf: Any) -> Any:
    """Returns a copy of a tensor, which may be written to, and anything else unchanged."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves that :func:`map_leaves` visits, in its order."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors among the leaves of a tree, in order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves that :func:`map_leaves` visits, in its order, each with its name."""
    if isinstance(tree, Tensor) or has_to(tree):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_leaves(value, f"{name}.{key}")
    elif isinstance(tree, tuple | list):
        for place, value in enumerate(tree):
            yield from named_leaves(value, f"{name}.{place}")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if field.init:
                yield from named_leaves(getattr(tree, field.name), f"{name}.{field.name}")
    else:
        yield name, tree


def map_named(function: Callable[[str, Any], Any], tree: Any, name: str) -> Any:
    """Returns ``tree`` with ``function`` applied to the name and value of every leaf."""
    names = (found for found, _ in named_leaves(tree, name))
    return map_leaves(lambda leaf: function(next(names), leaf), tree)


def like_sequence(original: Any, values: list[Any]) -> Any:
    """Returns ``values`` as a sequence of the type of ``original``: a tuple, named tuple or list."""
    kind = type(original)
    return kind(*values) if hasattr(original, "_fields") else kind(values)


def like_mapping(original: Any, mapped: dict[Any, Any]) -> Any:
    """Returns ``mapped`` in the type of ``original``, or as a dict if that type cannot be built from a dict."""
    try:
        return type(original)(mapped)
    except TypeError:
        return mapped
