"""Tracks which values that modules return reach which later call, by observing every operator that runs around modules.

::

    x = embed(words)           memory of value 0
    h = x + place[:n]          made of value 0; reads the weight "place" before call 1
    y = block(h)               call 1 needs value 0, and returns value 1
    return head(y + h)         call 2 needs values 0 and 1

Memory is tracked, not tensors, so that in-place writes and views are seen as well. If a module makes a tensor without
returning it, and other code uses the tensor, it would be missing on another rank: this is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from evener.components.tree_spec import taken_apart
from evener.data.batch import map_leaves
from evener.errors import TaskError
from evener.torch_internals.autograd import hooks_of
from evener.torch_internals.dispatch import READS_NUMBER, DispatchMode, written
from evener.torch_internals.storages import StorageWeakRef, address, memory_of

_PLAIN = bool | int | float | complex | str | torch.dtype | torch.device | torch.Size | None
_BY_NUMBERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass
class ModuleCall:
    """One call of a module."""

    name: str
    needs: set[int] = field(default_factory=set)
    """Calls whose values this call is given or reads."""
    reads: set[str] = field(default_factory=set)
    """Names of weights that the call uses."""
    overwritten: bool = False
    """True if the code around modules writes into the result."""


@dataclass
class _Checkpoint:
    """Code around modules that backward runs again (``torch.utils.checkpoint``), from its beginning, for whatever it
    needs of it."""

    first: int
    """Number of calls before it."""
    last: int = -1
    """Last call in it of which backward needs something."""
    around: set[int] = field(default_factory=set)
    """Values of which backward needs something that the code made of them, after the first call in it."""


@dataclass(frozen=True)
class _Mark:
    """Origin of the content of a piece of memory."""

    values: frozenset[int] = frozenset()
    """Calls whose values the content was made of."""
    hidden: int | None = None
    """Call that made the content and has not returned it."""
    spoilt: int | None = None
    """Call that wrote into the memory although it was not its own."""
    drawn: bool = False
    """True if the code around modules made the content of random numbers."""


class Flow(DispatchMode):
    """Tracks one run of a model, inside the block that it opens.

    Args:
        weights: Name of each parameter and buffer, by the address of its memory.
        inputs: Inputs of the model.
        kept: A key of each tensor that attributes around modules hold, by the address of its memory.

    Raises:
        TaskError: In the block, if the model does something that would get lost on several ranks.
    """

    def __init__(
        self, weights: dict[int, str], inputs: Any, kept: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self._kept = kept
        self.kept_used: set[str] = set()
        """Keys of kept tensors that the code around modules uses, or gives to modules."""
        self.kept_written: set[str] = set()
        """Keys of kept tensors into which the code around modules writes."""
        self._results: list[Tensor] = []
        self.calls: list[ModuleCall] = []
        self._checkpoints: list[_Checkpoint] = []
        self.reads: dict[str, int] = {}
        """Weights that the code around modules reads, each with the number of calls before it."""
        self._weights = weights
        self._marks: dict[int, tuple[StorageWeakRef, _Mark]] = {}
        self._within: int | None = None
        self._idle = False
        self._decided: dict[int, int] = {}
        """Values that control flow around modules depends on, each with the number of calls before that."""
        self._inputs = frozenset(place for each in taken_apart(inputs)[1] for place in _addresses(each))
        self.overwrites_inputs = False
        """True if the code around modules writes into the model's inputs."""
        self._mark(taken_apart(inputs)[1], _Mark())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._idle:
            return func(*args, **kwargs)
        tensors = taken_apart((args, kwargs))[1]
        given = self._used(tensors)
        if self._within is None:
            given = self._looked_at(func, tensors, given)
        targets = taken_apart(written(func, args, kwargs))[1]
        found = func(*args, **kwargs)
        if self._within is None:
            self._written_around(targets, given)
            self._mark(taken_apart(found)[1], given)
        else:
            self._written_within(targets, self._within)
            self._made_within(taken_apart(found)[1], tensors, self._within)
        return found

    # Calls of modules

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call of a module. Tensors in its result get memory of their own, and no graph."""
        number, came = len(self.calls), self._used(taken_apart((args, kwargs))[1])
        _refuse_drawn(came)
        self.calls.append(ModuleCall(name, set(came.values)))
        self._within = number
        try:
            found = forward(*args, **kwargs)
        finally:
            self._within = None
        return map_leaves(lambda leaf: self._returned(leaf, number), found)

    def _returned(self, leaf: Any, number: int) -> Any:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                raise TaskError(
                    f"{self.calls[number].name} returns an object of {type(leaf).__name__}, which cannot go to another "
                    "rank: let it return tensors, or tensors in tuples, lists, dicts and dataclasses"
                )
            return leaf
        with self.unseen():
            # Not a leaf: in-place writes to a leaf are forbidden.
            fresh = leaf.detach().requires_grad_(leaf.requires_grad).clone()
        self._mark([fresh], _Mark(frozenset({number})))
        self._results.append(fresh)
        return fresh

    def ended(self, outputs: Any) -> set[int]:
        """Returns the values that the model's outputs are made of or depend on. Adds to each call's needs the values
        that control flow before it depended on."""
        used = self._used(taken_apart(outputs)[1])
        _refuse_drawn(used)
        if any(hooks_of(tensor) for tensor in self._results):
            raise TaskError(
                "the code around the blocks registers a hook on what a module returned, which each stage of a pipeline "
                "would call with its own part of the gradient: register it inside of a block"
            )
        found = set(used.values)
        for number, call in enumerate(self.calls):
            decided = (value for value, since in self._decided.items() if since <= number + 1)
            call.needs |= {value for value in decided if value < number}
        return found | self._decided.keys()

    # Activation checkpoints

    def checkpoint(self) -> Callable[[Tensor], None]:
        """Called where an activation checkpoint begins. Returns a function to call with each tensor that it saves."""
        self._checkpoints.append(_Checkpoint(len(self.calls)))
        return partial(self._saved, self._checkpoints[-1])

    def _saved(self, checkpoint: _Checkpoint, tensor: Tensor) -> None:
        if self._within is not None:
            checkpoint.last = self._within
        elif checkpoint.first < len(self.calls):
            checkpoint.around |= {value for _, mark in self._known(tensor) for value in mark.values}

    def parts_checkpoint(self, begin: int, needed: set[int]) -> bool:
        """Returns True if a stage that begins at call ``begin`` would run a checkpoint again that calls modules of
        earlier stages.

        Args:
            needed: Values that the model's outputs need.
        """
        later = needed.union(*(call.needs for call in self.calls[begin:]))
        return any(
            each.first < begin and (each.last >= begin or any(v < begin for v in each.around & later))
            for each in self._checkpoints
        )

    # Code around modules

    def _looked_at(self, func: Any, tensors: list[Tensor], given: _Mark) -> _Mark:
        tags = getattr(func, "tags", ())
        if func is READS_NUMBER or any(tag in tags for tag in _BY_NUMBERS):
            for value in given.values:
                self._decided.setdefault(value, len(self.calls))
            if tensors[0].dtype is not torch.bool:  # a bool decides between calls, which shows in their list
                _refuse_drawn(given)
        return replace(given, drawn=given.drawn or torch.Tag.nondeterministic_seeded in tags)

    def _written_around(self, targets: list[Tensor], given: _Mark) -> None:
        for value in {v for target in targets for _, mark in self._known(target) for v in mark.values}:
            self.calls[value].overwritten = True
        places = {place for target in targets for place in _addresses(target)}
        self.overwrites_inputs |= not self._inputs.isdisjoint(places)
        self.kept_written |= {self._kept[place] for place in places & self._kept.keys()}
        self._mark(targets, given)

    def _written_within(self, targets: list[Tensor], number: int) -> None:
        for target in targets:
            if any(mark.hidden != number for _, mark in self._known(target)):
                self._mark([target], _Mark(spoilt=number))

    # Marks of memory

    def _used(self, tensors: list[Tensor]) -> _Mark:
        """Returns the combined origin of the tensors."""
        found, drawn = set[int](), False
        for tensor in tensors:
            self._note_weight(tensor)
            self.kept_used |= {self._kept[place] for place in _addresses(tensor) if place in self._kept}
            for _, mark in self._known(tensor):
                self._check(mark)
                found |= mark.values
                drawn |= mark.drawn
        if self._within is not None:
            self.calls[self._within].needs |= found - {self._within}
        return _Mark(frozenset(found), drawn=drawn)

    def _note_weight(self, tensor: Tensor) -> None:
        for place in _addresses(tensor):
            if place not in self._weights:
                continue
            if self._within is None:
                self.reads.setdefault(self._weights[place], len(self.calls))
            else:
                self.calls[self._within].reads.add(self._weights[place])

    def _check(self, mark: _Mark) -> None:
        if mark.hidden is not None and mark.hidden != self._within:
            raise TaskError(
                f"{self._who()} uses a tensor that {self.calls[mark.hidden].name} made and did not return (it was left "
                "in an attribute, or in a list): return it, since stages of a pipeline on other ranks are given only "
                "what modules return"
            )
        if mark.spoilt is not None and mark.spoilt != self._within:
            raise TaskError(
                f"{self.calls[mark.spoilt].name} writes into a tensor that it was given, and {self._who()} uses it "
                "afterwards: write into a copy, or return it and use what is returned"
            )

    def _who(self) -> str:
        return "the code around the blocks" if self._within is None else self.calls[self._within].name

    def _known(self, tensor: Tensor) -> Iterator[tuple[int, _Mark]]:
        for place in _addresses(tensor):
            reference, mark = self._marks.get(place, (None, None))
            if reference is not None and mark is not None and not reference.expired():
                yield place, mark

    def _mark(self, tensors: Iterable[Tensor], mark: _Mark) -> None:
        for tensor in tensors:
            for part in memory_of(tensor):
                storage = part.untyped_storage()
                self._marks[address(storage)] = StorageWeakRef(storage), mark

    def _made_within(self, tensors: Iterable[Tensor], given: Iterable[Tensor], number: int) -> None:
        """Marks new memory as hidden. Views of given tensors keep their mark."""
        old = {place for tensor in given for place in _addresses(tensor)}
        new = [tensor for tensor in tensors if not old.intersection(_addresses(tensor))]
        self._mark(new, _Mark(hidden=number))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Ignores operators inside the block."""
        self._idle = True
        try:
            yield
        finally:
            self._idle = False


def _refuse_drawn(mark: _Mark) -> None:
    if mark.drawn:
        raise TaskError(
            "the code around the blocks draws random numbers (F.dropout, torch.rand), which each stage of a pipeline "
            "would draw anew: draw them inside of a block, or have a module draw them, such as nn.Dropout"
        )


def _addresses(tensor: Tensor) -> Iterator[int]:
    for part in memory_of(tensor):
        yield address(part.untyped_storage())
