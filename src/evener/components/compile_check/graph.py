"""Compares the compiled graphs of ``torch.compile`` with the original code, and runs wrong ones uncompiled.

A backend gets the captured graph and returns compiled code. :class:`Compared` is a backend that wraps another. Its code
runs the compiled code, and compares it before use: in the first call, and in calls with new input sizes, because a
graph for any size may be wrong for some sizes only. ::

    call 1    64 samples    compared ── the same ──▶ compiled
    call 2    64 samples                             compiled
    call 3    37 samples    compared ── differs ──▶  plain, from now on: the captured graph

Layers that wait for other ranks are in no graph, because they cause graph breaks. So each rank can compare on its own.
It reports its findings to the other ranks later, at a point that all ranks reach: see :class:`Findings`.
"""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.components.compile_check.difference import GraphComparison, GraphPlace, Wrong
from evener.components.compile_check.eager_graph import plain_graph, unlike
from evener.nn.fqn import clean_name
from evener.torch_internals.compiling import (
    Backend,
    asked_through,
    backend_called,
    name_of,
    without_cuda_graphs,
)
from evener.torch_internals.dispatch import active_fake_mode

SIZES = 16
"""The number of input sizes with which a graph is compared when they first occur."""
CALLS = 50
"""After these, one new size is compared in this many calls."""
ITSELF = "what the task itself compiles"
_SHOWN = 3
_OFTEN = f"its inputs come in more than {SIZES} sizes, and one more in {CALLS} calls is compared"
_SENDING = ("c10d", "torch.distributed")
"""Parts of the names of functions that communicate."""


@dataclass(frozen=True)
class GraphFinding:
    """A finding about the compiled code of a block."""

    block: str
    """The block's name in the model; empty for the whole model."""
    message: str
    is_wrong: bool
    """True if the code computes wrong results. False if it could not be compared."""


class Findings:
    """This rank's findings, and the blocks that run uncompiled because some rank has found them wrong.

    Copies of a model in the same process share this object.
    """

    def __init__(self) -> None:
        self.untold: list[GraphFinding] = []
        """Findings that other ranks do not know yet."""
        self.uncompiled: set[str] = set()
        self._known: set[GraphFinding] = set()

    def add(self, finding: GraphFinding) -> None:
        """Records a finding, once even if it occurs in many calls."""
        if finding not in self._known:
            self._known.add(finding)
            self.untold.append(finding)

    def __deepcopy__(self, memo: Any) -> Findings:
        return self

    def __reduce__(self) -> Any:
        return Findings, ()


def findings_text(of_ranks: Sequence[Sequence[GraphFinding]], is_wrong: bool) -> str:
    """Returns the findings of all ranks as a text: each block once, in the words of the first rank that reports it.
    Returns "" if there are none."""
    said: dict[str, list[str]] = {}
    ranks: dict[str, list[str]] = {}
    for rank, findings in enumerate(of_ranks):
        for each in findings:
            if each.is_wrong == is_wrong and str(rank) not in ranks.setdefault(each.block, []):
                new = not ranks[each.block]
                ranks[each.block].append(str(rank))
                said.setdefault(each.message, []).extend([each.block] if new else [])
    return ". ".join(
        f"In {_listed([block or 'the whole model' for block in blocks])} (rank {_listed(ranks[blocks[0]])}): {message}"
        for message, blocks in said.items()
        if blocks
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@dataclass(frozen=True)
class Caller:
    """The block that is being computed."""

    name: str
    block: nn.Module
    findings: Findings

    def name_of(self, held: Tensor, written: str) -> str:
        """Returns the name of a parameter or buffer in the block. Returns ``written`` if it is neither.

        Args:
            written: TorchDynamo's name for it in the graph, such as ``L_fn_self_modules_0_parameters_weight_``. It
                identifies the tensor if a strategy has replaced the block's own tensors.
        """
        tensors = {"parameters": self.block.named_parameters, "buffers": self.block.named_buffers}
        paths: dict[str, str] = {}
        for kind, named in tensors.items():
            for name, each in named():
                if each is held:
                    return clean_name(name)
                *modules, own = name.split(".")
                path = "".join(f"_modules_{module}" for module in modules) + f"_{kind}_{own}_"
                paths[_letters(path)] = clean_name(name)
        found = max((path for path in paths if _letters(written).endswith(path)), key=len, default=None)
        return written if found is None else paths[found]


def _letters(name: str) -> str:
    return re.sub("[^a-zA-Z0-9]+", "_", name)


class _Callers(threading.local):
    """The blocks that a thread is computing, the innermost last. A process may compute on several devices in several
    threads."""

    def __init__(self) -> None:
        self.open: list[Caller] = []
        self.asking = False
        """True while a backend is compiling code that is already being compared."""


_callers = _Callers()
_watching: list[Caller] = []
"""The callers to which code compiled by the task itself is attributed; the last one is used."""


@contextmanager
def called(caller: Caller) -> Iterator[None]:
    """Attributes graphs that run in the block to ``caller``."""
    _callers.open.append(caller)
    try:
        yield
    finally:
        _callers.open.pop()


@contextmanager
def watched(model: nn.Module, findings: Findings) -> Iterator[None]:
    """Compares all graphs that are compiled in the block, also those of a task that compiles its model itself."""
    caller = Caller(ITSELF, model, findings)
    with nullcontext() if _watching else asked_through(_ask):
        _watching.append(caller)
        try:
            yield
        finally:
            _watching.remove(caller)


def _ask(backend: Backend, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    if _callers.asking or not _watching:
        code: Callable[..., Any] = backend(graph, examples)
        return code
    return _compared(backend, graph, examples)


@dataclass(frozen=True)
class Compared:
    """A backend for ``torch.compile`` that wraps another one and compares its code. Equal instances share compiled
    code."""

    backend: str
    mode: str | None

    @cached_property
    def _backend(self) -> Backend:
        # With fallback_random, compiled code draws the same random numbers as the plain code.
        return backend_called(self.backend, self.mode, fallback_random=True)

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return _compared(self._backend, graph, examples)


def _compared(backend: Backend, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Returns the compiled code of a graph, with comparison. With CUDA graphs, the same code is compared without them,
    because recording would mistake a trial for a pass of the model."""
    plain, other = plain_graph(graph), fx.GraphModule(graph, copy.deepcopy(graph.graph))
    unrecorded = without_cuda_graphs(backend)
    before, _callers.asking = _callers.asking, True
    try:
        tried = None if unrecorded is None else unrecorded(other, examples)
        compiled = backend(graph, examples)  # may change the graph
    finally:
        _callers.asking = before
    made = Graph(name_of(backend), plain, compiled, tried or compiled, examples)
    return lambda *args: made(*args)


class Graph:
    """One compiled graph, as a callable.

    Args:
        tried: The compiled code that is used in comparisons.
    """

    def __init__(
        self,
        backend: str,
        plain: fx.GraphModule,
        compiled: Callable[..., Any],
        tried: Callable[..., Any],
        examples: Sequence[Any],
    ) -> None:
        self._backend, self._plain, self._run = backend, plain, compiled
        self._comparison: GraphComparison | None = GraphComparison(plain, tried)
        self._changing = [at for at, each in enumerate(examples) if not isinstance(each, nn.Parameter)]
        self._sizes: set[Any] = set()
        self._calls = 0
        self._notes: list[tuple[str, bool]] = []
        """Texts of findings, and whether each is about wrong results."""
        self._give_up(_why_not(plain))

    def __call__(self, *args: Any) -> Any:
        caller = next(iter([*_callers.open[-1:], *_watching[-1:]]), None)
        if caller is None or active_fake_mode() is not None or _has_symbols(args):
            return self._run(*args)  # DDP first calls its pieces of a graph with fake tensors
        self._calls += 1
        if self._comparison is not None:
            sizes = tuple(_size(args[at]) for at in self._changing)
            if sizes not in self._sizes and self._is_time():
                self._sizes.add(sizes)
                self._compare(self._comparison, caller, args)
        for message, is_wrong in self._notes:
            caller.findings.add(GraphFinding(caller.name, message, is_wrong))
        return self._run(*args)

    def _is_time(self) -> bool:
        often = len(self._sizes) == SIZES + self._calls // CALLS
        if often and (note := (_OFTEN, False)) not in self._notes:
            self._notes.append(note)
        return not often

    def _give_up(self, why: str | None) -> None:
        if why is not None:
            self._comparison = None
            self._notes.append((why, False))

    def _compare(self, comparison: GraphComparison, caller: Caller, args: Sequence[Any]) -> None:
        try:
            wrong = comparison.wrong(args)
        except torch.OutOfMemoryError:
            self._give_up("there is no room for what it computes a second time")
        except Exception as error:
            self._give_up(
                f"to compute it a second time raised {type(error).__name__}: {error}".splitlines()[0]
            )
        else:
            if comparison.by_chance:
                self._give_up(f"what {self._backend} makes of it draws random numbers of its own")
            if wrong:
                self._notes = [(self._said(wrong, caller, args), True)]
                self._run, self._comparison = self._plain, None

    def _said(self, wrong: Sequence[Wrong], caller: Caller, args: Sequence[Any]) -> str:
        shown = [f"{self._named(each.place, caller, args)} {_off(each)}" for each in wrong[:_SHOWN]]
        shown += [f"{len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        sizes = ", ".join("x".join(map(str, args[at].shape)) for at in self._changing if _counts(args[at]))
        return f"{'; '.join(shown)}; with inputs of {sizes or 'no size'}"

    def _named(self, place: GraphPlace, caller: Caller, args: Sequence[Any]) -> str:
        if place.kind == "output":
            return f"output {place.at}"
        written = str(self._plain.graph.find_nodes(op="placeholder")[place.at].target)
        name = caller.name_of(args[place.at], written)
        return f"the gradient of {name}" if place.kind == "gradient" else f"what it leaves in {name}"


def _off(wrong: Wrong) -> str:
    """Describes the size of a difference, and of rounding."""
    if math.isinf(wrong.apart):
        return "is of another shape or type, or not finite"
    return f"is {100 * wrong.apart:.3g} % off (rounding: {100 * wrong.floor:.0e} %)"


def _has_symbols(args: Sequence[Any]) -> bool:
    return any(isinstance(each, torch.SymInt) for each in args)


def _size(given: Any) -> Any:
    """Returns the properties of an input for which code may be specialized: a tensor's shape, or the value itself."""
    return tuple(given.shape) if isinstance(given, Tensor) else given


def _counts(given: Any) -> bool:
    return isinstance(given, Tensor) and given.ndim > 0


def _why_not(graph: fx.GraphModule) -> str | None:
    """Returns why the graph cannot be compared by one rank alone. Returns None if it can."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(attrgetter(str(node.target))(graph), Tensor):
            return f"it holds {node.target} itself, as an update does its weights, and a trial could write to that"
        if node.op == "call_function" and any(word in _home(node.target) for word in _SENDING):
            return f"it waits for other ranks in {node.target}"
    operator = unlike(graph)
    return None if operator is None else f"{operator} is another algorithm where it is not compiled"


def _home(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{function}"
