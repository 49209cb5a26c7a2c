"""Leaves of autograd that a recording has for itself, in place of the model's parameters.

Autograd has a node for each parameter that accumulates its gradient. It belongs to the stream on which it was made,
lives as long as any graph of autograd leads to it, and DistributedDataParallel keeps it for good. Backward makes the
node's stream wait for the stream of the gradient. A stream that is recorded may not be waited for by another, so that a
node of an earlier pass breaks the recording. So the model is recorded with other leaves, which have the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from evener.torch_internals.modules import own_parameters


@contextmanager
def own_leaves(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Replaces ``parameters`` within the block by others with the same memory: in the model's modules, and in lists
    that are attributes of modules, where recurrent ones have them, and weak references to them. Yields the others, in
    order."""
    made = {p: _other(p) for p in parameters}
    homes: list[tuple[Any, Any, Any, Any]] = []
    for module in model.modules():
        own = own_parameters(module)
        homes += ((own, name, p, made[p]) for name, p in own.items() if p is not None and p in made)
        for held in (each for each in vars(module).values() if type(each) is list):
            pairs = ((place, each, _in_place_of(each, made)) for place, each in enumerate(held))
            homes += ((held, place, each, other) for place, each, other in pairs if other is not None)
    try:
        for home, key, _, other in homes:
            home[key] = other
        yield [made[p] for p in parameters]
    finally:
        for home, key, each, _ in homes:
            home[key] = each


def _in_place_of(entry: Any, made: Mapping[nn.Parameter, nn.Parameter]) -> Any:
    """Returns what stands in place of an entry of a list; None if it stays."""
    if isinstance(entry, weakref.ref):
        other = _in_place_of(entry(), made)
        return None if other is None else weakref.ref(other)
    return made.get(entry) if isinstance(entry, nn.Parameter) else None


def _other(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made
