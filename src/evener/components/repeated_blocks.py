"""What a model repeats: the blocks that are compiled once for all, and computed twice to take less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_LEAST = 2
"""Modules of one kind in a list that make them blocks."""


def repeated_blocks(model: nn.Module) -> Iterator[str]:
    """Names of the modules that are repeated: in a list, of a class that is there at least twice, and with weights in
    modules of their own; outermost ones only."""

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
    """The blocks of a list: what has modules inside."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    return [child for child in module if any(child.children()) and not isinstance(child, nn.ModuleList)]
