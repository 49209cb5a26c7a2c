"""Finds the repeated blocks of a model. They are compiled once for all, or recomputed in backward to save memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_LEAST = 2
"""Minimum number of modules of one class in a list that makes them blocks."""


def repeated_blocks(model: nn.Module) -> Iterator[str]:
    """Yields the names of repeated modules: in a list that has at least two of their class, and with submodules. Only
    the outermost ones."""

    def within(module: nn.Module, path: str) -> Iterator[str]:
        kinds = Counter(map(type, _blocks_in(module)))
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if kinds[type(child)] >= _LEAST and child in _blocks_in(module):
                yield below
            else:
                yield from within(child, below)

    return within(model, "")


def _blocks_in(module: nn.Module) -> list[nn.Module]:
    """Returns the modules of a list that have submodules."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    return [child for child in module if any(child.children()) and not isinstance(child, nn.ModuleList)]
