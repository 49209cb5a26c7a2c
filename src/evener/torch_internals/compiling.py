"""Private names of torch's compiler: dynamic sizes, counters of compiled graphs, and backends.

``maybe_mark_dynamic`` is documented in the guide on dynamic shapes, and the counters in the guide on recompilations.
Both are in a private module, which torch imports when it is first used; that takes a second. ``torch.compiler.disable``
imports it where a function is defined. ``_disable_dynamo``, which torch uses for its own functions, imports it when the
function is first called. So a process that computes nothing, such as the launcher, starts a second earlier. Its wrapper
takes 6 us a call. So it is passed by where the compiler is not active, which ``get_eval_frame_callback`` tells.
``_torchdynamo_disable`` marks a function that compiled code is not to trace, and ``set_code_exec_strategy`` leaves the
code of the own wrapper alone. At subclasses of tensors in ``nontraceable_tensor_subclasses`` a graph ends.

``torch.compile`` accepts a function of a graph and example inputs as a backend, but has no public way to get a backend
by name and mode. It makes them of two private classes, which know the options of each mode.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo

_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """Keeps ``torch.compile`` from compiling ``function``, which waits for other ranks or reads changing state."""
    disabled = _disable_dynamo(function)

    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if eval_frame.get_eval_frame_callback() is None else disabled)(*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(called.__code__, _SKIPPED)
    return cast(F, wraps(function)(called))


def kept_out_of_graphs(kind: type[Tensor]) -> None:
    """Keeps ``torch.compile`` from tracing what is done with tensors of a subclass."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(kind)


class Compiled(NamedTuple):
    """The numbers of graphs and graph breaks in this process."""

    graphs: int
    breaks: int
    """Graph breaks: places where a function was split because its code cannot be compiled."""


def with_any_size(tensor: Tensor) -> None:
    """Marks dimension 0 as dynamic: one graph serves all its sizes, except size 1, which has its own graph."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def compiled_so_far() -> Compiled:
    """Returns the numbers of graphs and graph breaks since the process started."""
    counters = torch._dynamo.utils.counters
    return Compiled(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


Backend = Callable[..., Any]
"""A function that compiles a graph with example inputs."""


def backend_called(name: str, mode: str | None, **options: Any) -> Backend:
    """Returns the backend that ``torch.compile(backend=name, mode=mode)`` uses.

    Args:
        options: Options of inductor, in addition to those of the mode. Other backends get none.
    """
    kinds: Any = torch
    if name == "inductor":
        return cast(Backend, kinds._TorchCompileInductorWrapper(mode, options, None))
    return cast(Backend, kinds._TorchCompileWrapper(name, mode, None, None))


def name_of(backend: Backend) -> str:
    """Returns the name that ``torch.compile`` gives to a backend."""
    return str(getattr(backend, "compiler_name", backend))


def without_cuda_graphs(backend: Backend) -> Backend | None:
    """Returns the same backend without CUDA graphs. Returns None if ``backend`` uses none."""
    options: dict[str, Any] = getattr(backend, "config", {})
    if not options.get("triton.cudagraphs") or not torch.cuda.is_available():
        return None
    return backend_called("inductor", None, **{**options, "triton.cudagraphs": False})


@contextmanager
def asked_through(around: Callable[[Backend, Any, Any], Any]) -> Iterator[None]:
    """Calls ``around`` in place of the backend for every compilation by ``torch.compile`` in the block.

    Args:
        around: Takes the backend, the graph and the example inputs. It may call the backend with the other two.
    """
    kinds: Any = torch
    classes = (kinds._TorchCompileInductorWrapper, kinds._TorchCompileWrapper)
    originals = [kind.__call__ for kind in classes]

    def asked(self: Any, graph: Any, examples: Any, *, _original: Any, **others: Any) -> Any:
        bound: Any = partial(_original, self, **others)
        bound.compiler_name, bound.config = self.compiler_name, getattr(self, "config", {})
        return around(bound, graph, examples)

    for kind, original in zip(classes, originals, strict=True):
        kind.__call__ = partialmethod(asked, _original=original)
    try:
        yield
    finally:
        for kind, original in zip(classes, originals, strict=True):
            kind.__call__ = original
