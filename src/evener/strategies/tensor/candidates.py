"""Guesses which layers of a module may be a region, by their widths and order alone. A trial decides about each guess.

::

    up (8 -> 32)                     down (32 -> 8)      one layer, or two with a gate
    q (8 -> 8)  k, v (8 -> 4)        o (8 -> 8)          by the heads, of which several may share a key
    qkv (8 -> 24)                    o (8 -> 8)          three blocks, or the three of each head side by side

The number of heads is looked for in the attributes of modules, and so are sizes that their code uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

Place = tuple[str, str]
"""Module and attribute, by name."""

_HEADS = re.compile(r"(^|_)(nh|heads?|h)$|heads", re.IGNORECASE)
_HEAD_WIDTH = re.compile(
    r"head.*(dim|size|width|features)|dim_?(per_)?head|^(d_k|d_v|d_kv|hd)$", re.IGNORECASE
)
_NOT_HEADS = re.compile(r"group|idx|index|layer", re.IGNORECASE)


@dataclass(frozen=True)
class LinearCall:
    """A linear layer that was called once."""

    name: str
    read: int
    """Input features of the layer."""
    made: int
    """Output features of the layer."""


@dataclass(frozen=True)
class Column:
    """A layer that makes features: ``unit`` features stay together, and each of ``blocks`` is cut alike."""

    name: str
    unit: int
    blocks: int = 1


@dataclass(frozen=True)
class Guess:
    """Layers that may be a region."""

    columns: tuple[Column, ...]
    row: str
    unit: int
    """Number of the row's features that stay together."""
    runs: int
    """Number of such runs of features."""
    heads: frozenset[int] = frozenset()
    """Numbers of heads."""
    widths: frozenset[int] = frozenset()
    """Numbers of features that are divided."""


@dataclass(frozen=True)
class TriedRegion:
    """A region that a trial has confirmed: computed in parts, it gives the result of the whole."""

    module: str
    """Module whose forward was tried."""
    guess: Guess
    numbers: tuple[tuple[Place, int], ...] = ()
    """Attributes that must hold a rank's part, each with its value in the whole."""
    stand_in: tuple[int | str, int] | None = None
    """Argument of the module that must look as wide as a part, and its width in the whole."""
    drops: tuple[tuple[str, int, int], ...] = ()
    """Evener's dropouts between: name, divided dimension counted from the end, and its whole length."""
    terms: tuple[Place, ...] = ()
    """Parameters between the layers; each rank has a term of their gradients."""
    draws: bool = False
    """True if code between the layers draws random numbers in training."""

    def renamed(self, old: str, new: str) -> TriedRegion:
        """Returns the same region for a module that is built alike."""

        def name(given: str) -> str:
            return new + given.removeprefix(old)

        columns = tuple(replace(column, name=name(column.name)) for column in self.guess.columns)
        return replace(
            self,
            module=new,
            guess=replace(self.guess, columns=columns, row=name(self.guess.row)),
            numbers=tuple(((name(module), key), value) for (module, key), value in self.numbers),
            drops=tuple((name(module), *rest) for module, *rest in self.drops),  # type: ignore[misc]
            terms=tuple((name(module), key) for module, key in self.terms),
        )


def guesses(row: LinearCall, before: Sequence[LinearCall], numbers: Mapping[Place, int]) -> Iterator[Guess]:
    """Yields the regions that may end with ``row`` and begin with layers called before it, the likeliest first."""
    heads = list(_heads(numbers, row.read))
    if len(before) > 2:
        yield from _separate(before[-3:], row, heads)
    if len(before) > 1:
        yield from _alone(before[-2:], row)
    if before:
        yield from _fused(before[-1], row, heads)
        yield from _alone(before[-1:], row)


def _heads(numbers: Mapping[Place, int], width: int) -> Iterator[int]:
    """Yields the possible numbers of heads for a total of ``width`` features."""
    named = [value for (_, name), value in numbers.items() if _is_heads(name)]
    sizes = [width // value for (_, name), value in numbers.items() if _HEAD_WIDTH.search(name) and value > 0]
    found = [value for value in (*named, *sizes) if 1 < value <= width and width % value == 0]
    others = [value for value in numbers.values() if 1 < value < width and width % value == 0]
    yield from dict.fromkeys(found or others)


def _is_heads(name: str) -> bool:
    return bool(_HEADS.search(name)) and not _HEAD_WIDTH.search(name) and not _NOT_HEADS.search(name)


def _alone(columns: Sequence[LinearCall], row: LinearCall) -> Iterator[Guess]:
    """Yields the guess that divides feature by feature, with a gate (two columns) or without."""
    if all(column.made == row.read for column in columns):
        made = tuple(Column(column.name, 1) for column in columns)
        yield Guess(made, row.name, 1, row.read, widths=frozenset({row.read}))


def _separate(columns: Sequence[LinearCall], row: LinearCall, heads: Sequence[int]) -> Iterator[Guess]:
    """Yields guesses for separate queries, keys and values."""
    queries = next((column for column in columns if column.made == row.read), None)
    shared = {column.made for column in columns if column is not queries}
    for count in heads if queries is not None and len(shared) == 1 else ():
        (made,) = shared
        width = row.read // count
        keys, odd = divmod(made, width)
        if odd or not keys or count % keys:
            continue
        unit = count // keys * width
        found = tuple(Column(c.name, unit if c is queries else width) for c in columns)
        yield Guess(found, row.name, unit, keys, frozenset({count, keys}), frozenset({row.read, made}))


def _fused(column: LinearCall, row: LinearCall, heads: Sequence[int]) -> Iterator[Guess]:
    if column.made == 2 * row.read:  # a gate
        yield Guess((Column(column.name, 1, 2),), row.name, 1, row.read, widths=frozenset({row.read}))
        yield Guess(
            (Column(column.name, 2),), row.name, 1, row.read, widths=frozenset({row.read, column.made})
        )
    for count in heads:
        width = row.read // count
        widths = frozenset({row.read, column.made})
        if column.made == 3 * row.read:
            whole = frozenset({count}), widths
            yield Guess((Column(column.name, width, 3),), row.name, width, count, *whole)
            yield Guess((Column(column.name, 3 * width),), row.name, width, count, *whole)
            continue
        keys, odd = divmod(column.made - row.read, 2 * width)
        if not odd and 0 < keys < count and count % keys == 0:
            unit = count // keys * width
            numbers = frozenset({count, keys}), widths
            yield Guess((Column(column.name, unit + 2 * width),), row.name, unit, keys, *numbers)


def changes(guess: Guess, numbers: Mapping[Place, int]) -> list[tuple[Place, ...]]:
    """Returns sets of attributes that may have to hold a rank's part, the smallest first, the empty set included."""
    divided = {place: value for place, value in numbers.items() if value % guess.runs == 0 and value > 0}
    heads = tuple(p for p, value in divided.items() if value in guess.heads and _is_heads(p[1]))
    widths = tuple(p for p, value in divided.items() if value in guess.widths and not _is_layer(p[1]))
    both = tuple(dict.fromkeys((*heads, *widths)))
    return list(dict.fromkeys(((), heads, widths, both)))


def _is_layer(name: str) -> bool:
    return name in ("in_features", "out_features", "nx", "nf")
