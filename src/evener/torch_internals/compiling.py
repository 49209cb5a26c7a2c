"""Of torch's compiler: a tensor whose first size changes from call to call, what has been compiled, and backends.

``maybe_mark_dynamic`` is documented in the guide on dynamic shapes, the counters in that on recompilations; both lie in
a module with an underscore, which torch imports when it is first asked for, and takes a second.
``torch.compiler.disable`` imports it at once, where a function is defined; ``_disable_dynamo``, by which torch marks
its own functions, when the function is first called. So a process that computes nothing, as the launcher, starts a
second earlier.

``torch.compile`` takes a function of a graph and example inputs as a backend, but gives nobody those that it has by
name: it makes them of two classes with an underscore, which know what a mode stands for.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """Has a graph of ``torch.compile`` leave ``function`` out: it waits for other ranks, or asks what changes."""
    return cast(F, _disable_dynamo(function))


class Compiled(NamedTuple):
    """Counts of what this process has compiled."""

    graphs: int
    breaks: int
    """Places at which a function was cut in two, because its code cannot be compiled."""


def with_any_size(tensor: Tensor) -> None:
    """Lets one graph serve for all sizes of dimension 0, but for 1, which has one of its own."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def compiled_so_far() -> Compiled:
    """Returns the counts since the process began."""
    counters = torch._dynamo.utils.counters
    return Compiled(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


Backend = Callable[..., Any]
"""A function that makes compiled code of a graph and example inputs."""


def backend_called(name: str, mode: str | None, **options: Any) -> Backend:
    """Makes the backend that ``torch.compile(backend=name, mode=mode)`` has.

    Args:
        options: Of inductor, besides those that the mode stands for; other backends get none.
    """
    kinds: Any = torch
    if name == "inductor":
        return cast(Backend, kinds._TorchCompileInductorWrapper(mode, options, None))
    return cast(Backend, kinds._TorchCompileWrapper(name, mode, None, None))


def name_of(backend: Backend) -> str:
    """Returns what ``torch.compile`` calls one of its backends."""
    return str(getattr(backend, "compiler_name", backend))


def without_cuda_graphs(backend: Backend) -> Backend | None:
    """Returns the same backend, whose code is not recorded; None if that of ``backend`` is not either."""
    options: dict[str, Any] = getattr(backend, "config", {})
    if not options.get("triton.cudagraphs") or not torch.cuda.is_available():
        return None
    return backend_called("inductor", None, **{**options, "triton.cudagraphs": False})


@contextmanager
def asked_through(around: Callable[[Backend, Any, Any], Any]) -> Iterator[None]:
    """Sends through ``around`` what ``torch.compile`` asks a backend for in the block.

    Args:
        around: Gets the backend, to be called by it, and the graph and example inputs.
    """
    kinds: Any = torch
    classes = (kinds._TorchCompileInductorWrapper, kinds._TorchCompileWrapper)
    originals = [kind.__call__ for kind in classes]

    def asked(self: Any, graph: Any, examples: Any, *, _original: Any, **others: Any) -> Any:
        return around(_Bound(self, partial(_original, self, **others)), graph, examples)

    for kind, original in zip(classes, originals, strict=True):
        kind.__call__ = partialmethod(asked, _original=original)
    try:
        yield
    finally:
        for kind, original in zip(classes, originals, strict=True):
            kind.__call__ = original


class _Bound:
    """A backend as it was before others were asked."""

    def __init__(self, backend: Any, call: Backend) -> None:
        self.compiler_name = backend.compiler_name
        self.config = getattr(backend, "config", {})
        self._call = call

    def __call__(self, graph: Any, examples: Any) -> Any:
        return self._call(graph, examples)
