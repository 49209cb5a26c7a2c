"""Of torch's compiler: a tensor whose first size changes from call to call, and what has been compiled so far.

``maybe_mark_dynamic`` is documented in the guide on dynamic shapes, the counters in that on recompilations; both lie in
a module with an underscore, which torch imports when it is first asked for, and takes a second.
``torch.compiler.disable`` imports it at once, where a function is defined; ``_disable_dynamo``, by which torch marks
its own functions, when the function is first called. So a process that computes nothing, as the launcher, starts a
second earlier.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """``function``, which a graph of ``torch.compile`` leaves out: it waits for other ranks, or asks what changes."""
    return cast(F, _disable_dynamo(function))


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
