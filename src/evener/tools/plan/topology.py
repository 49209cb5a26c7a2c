"""The links between the GPUs of a machine, from the text of ``nvidia-smi topo -m``, and the best ring over them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TypeVar

L = TypeVar("L")

_UNDERLINED = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_KIND = re.compile(r"NV[1-9]\d*|PIX|PXB|PHB|NODE|SYS")
_ALL_ORDERS = 8
"""The largest number of ranks of which every order is tried: 5040 rings. `evener devices` measures all pairs of as many
ranks, and of more ranks only the ring in their order."""


def read_link_kinds(text: str) -> list[list[str]]:
    """Returns the kinds of links between GPUs: ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``.

    Args:
        text: What ``nvidia-smi topo -m`` printed. Rows and columns of network cards, which come last, are left out.

    Returns:
        A row for each GPU, with a column for each GPU. The link of a GPU to itself is ``X``.

    Raises:
        ValueError: If there is no such matrix, or a link in it is of no known kind.
    """
    lines = [_UNDERLINED.sub("", line).split() for line in text.splitlines()]
    rows = [line for line in lines if line and _GPU.fullmatch(line[0]) and not _is_header(line)]
    kinds = [row[1 : len(rows) + 1] for row in rows]
    if not rows:
        raise ValueError("it has no row that begins with GPU0; write what `nvidia-smi topo -m` prints")
    for a, row in enumerate(kinds):
        for b in range(len(rows)):
            kind = row[b] if b < len(row) else "nothing"
            if not (kind == "X" if a == b else _KIND.fullmatch(kind) and kind == kinds[b][a]):
                raise ValueError(
                    f"{rows[a][0]} and {rows[b][0]} are joined by {kind}; `nvidia-smi topo -m` prints no such"
                )
    return kinds


def _is_header(line: Sequence[str]) -> bool:
    """Returns True for the line of column names. That of a single GPU is ``GPU0 CPU Affinity``."""
    return len(line) > 1 and (line[1] == "CPU" or _GPU.fullmatch(line[1]) is not None)


def slowest_of_best_ring(ranks: int, link: Callable[[int, int], L], seconds: Callable[[L], float]) -> L:
    """Returns the slowest link of the ring over all ranks whose slowest link is the fastest.

    A sum over a ring takes as long as its slowest link, since every byte passes every link. NCCL looks for such rings,
    too. Up to eight ranks all rings are compared; with more ranks, the one in their order counts.

    Args:
        ranks: Number of ranks, at least 2.
        link: The link between two ranks.
        seconds: How long a message takes on a link.
    """
    orders = permutations(range(1, ranks)) if ranks <= _ALL_ORDERS else [tuple(range(1, ranks))]
    rings = ([link(a, b) for a, b in zip((0, *order), (*order, 0), strict=True)] for order in orders)
    return min((max(ring, key=seconds) for ring in rings), key=seconds)
