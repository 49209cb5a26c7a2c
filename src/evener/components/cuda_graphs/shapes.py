"""Which batches get a graph: those of a shape that comes often, and of these only so many."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor


class ShapedGraph(Protocol):
    """A graph of batches of one shape."""

    replays: int
    """How often it has run."""


_Graph = TypeVar("_Graph", bound=ShapedGraph)
SEEN = 3
"""Batches of a shape from which on it gets a graph."""
MOST_GRAPHS = 8
MOST_SHAPES = 256
"""Shapes whose batches are counted."""
WORTHWHILE = 100
"""Replays of a graph that make up for its recording."""


class UnknownShapeError(ValueError):
    """A batch holds something whose shape is not known."""


def shape_of(tree: Any, device: torch.device) -> Hashable:
    """Returns a key that is equal for trees whose tensors have equal shapes, strides and types on ``device``, and whose
    other leaves are equal numbers or words.

    Raises:
        UnknownShapeError: If there are other leaves, or tensors elsewhere, of other layouts or with a gradient.
    """
    if isinstance(tree, Tensor):
        if type(tree) is not Tensor or tree.device != device or tree.layout is not torch.strided:
            raise UnknownShapeError(f"a tensor of type {type(tree).__name__} on {tree.device}")
        if tree.requires_grad:
            raise UnknownShapeError("a tensor with a gradient")
        return tree.shape, tree.stride(), tree.dtype
    if tree is None or isinstance(tree, bool | int | float | str):
        return type(tree), tree
    if type(tree) is dict:
        return dict, *((key, shape_of(value, device)) for key, value in tree.items())
    if isinstance(tree, tuple | list):
        return type(tree), *(shape_of(each, device) for each in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return type(tree), *(shape_of(getattr(tree, name), device) for name in names)
    raise UnknownShapeError(type(tree).__name__)


class GraphCache(Generic[_Graph]):
    """Graphs by shape; the one least recently used makes room.

    A graph that is dropped after few replays doubles the number of batches that a shape must have had before it gets
    one. So recording does not take much of the time where shapes alternate or the model keeps changing.
    """

    def __init__(self) -> None:
        self.patience = SEEN
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def graphs(self) -> list[_Graph]:
        """Returns all graphs."""
        return list(self._graphs.values())

    def find(self, shape: Hashable) -> _Graph | None:
        """Returns the graph of a shape, if there is one."""
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
        return self._graphs.get(shape)

    def is_due(self, shape: Hashable) -> bool:
        """Counts a batch of a shape without graph. Returns True if the shape should get one now."""
        self._seen[shape] = self._seen.pop(shape, 0) + 1
        if len(self._seen) > MOST_SHAPES:
            self._seen.popitem(last=False)
        return self._seen[shape] >= self.patience

    def keep(self, shape: Hashable, graph: _Graph) -> None:
        """Keeps a graph, and drops another if there are too many."""
        self._graphs[shape] = graph
        self._seen.pop(shape, None)
        if len(self._graphs) > MOST_GRAPHS:
            _, dropped = self._graphs.popitem(last=False)
            self._wait_longer(dropped.replays)

    def clear(self) -> None:
        """Drops all graphs."""
        self._wait_longer(max((graph.replays for graph in self._graphs.values()), default=WORTHWHILE))
        self._graphs.clear()
        self._seen.clear()

    def _wait_longer(self, replays: int) -> None:
        if replays < WORTHWHILE:
            self.patience *= 2
