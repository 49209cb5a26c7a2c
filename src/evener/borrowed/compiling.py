"""Of torch's compiler: a tensor whose first size changes from call to call, and what has been compiled so far.

``maybe_mark_dynamic`` is documented in the guide on dynamic shapes, the counters in that on recompilations; both lie in
a module with an underscore, which torch imports when it is first asked for, and takes a second.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Compiled(NamedTuple):
    """What this process has compiled."""

    graphs: int
    breaks: int
    """Places at which a function was cut in two, because its code cannot be compiled."""


def with_any_size(tensor: Tensor) -> None:
    """One graph may serve for all sizes of dimension 0, but for 1, which has one of its own."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def compiled_so_far() -> Compiled:
    """Counts since the process began."""
    counters = torch._dynamo.utils.counters
    return Compiled(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
