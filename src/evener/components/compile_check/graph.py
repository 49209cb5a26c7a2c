"""Graphs of ``torch.compile`` that are compared with the code they were made of, and run uncompiled if they differ.

A backend gets the graph that was captured, and returns compiled code. :class:`Compared` is a backend around another:
what it returns runs the compiled code, and compares it, before it is used, in the call for which it was made and in
calls with sizes that it has not had yet. One graph may be asked for any sizes, and be wrong for some of them. ::

    call 1    64 samples    compared ── the same ──▶ compiled
    call 2    64 samples                             compiled
    call 3    37 samples    compared ── differs ──▶  plain, from here on: the graph as it was captured

A graph has no layer in it that waits for other ranks, as these end graphs, so that each rank may compare when it has
to. What it finds is told to the others later, at a point to which all come: see :class:`Findings`.
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
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.components.compile_check.difference import Comparison, Place, Wrong
from evener.components.compile_check.eager_graph import plain_graph, unlike
from evener.nn.fqn import clean_name
from evener.torch_internals.compiling import (
    Backend,
    asked_through,
    backend_called,
    name_of,
    without_cuda_graphs,
)
from evener.torch_internals.fake_tensors import active_fake_mode

SIZES = 16
"""So many sizes of its inputs a graph is compared with, as soon as they come."""
CALLS = 50
"""Then with one new size in so many calls."""
ITSELF = "what the task itself compiles"
_SHOWN = 3
_OFTEN = f"its inputs come in more than {SIZES} sizes, and one more in {CALLS} calls is compared"
_SENDING = ("c10d", "torch.distributed")
"""In the names of functions that send something."""


@dataclass(frozen=True)
class Finding:
    """What was found of the code of a block."""

    block: str
    """Its name in the model; empty for the whole model."""
    words: str
    is_wrong: bool
    """Whether it computes something else; if not, that is not known."""


class Findings:
    """What this rank has found, and which blocks are computed uncompiled because some rank has found them wrong.

    Copies of a model, which are computed by the same process, have it in common.
    """

    def __init__(self) -> None:
        self.untold: list[Finding] = []
        """Not yet known to other ranks."""
        self.uncompiled: set[str] = set()
        self._known: set[Finding] = set()

    def add(self, finding: Finding) -> None:
        """Once, whatever the number of calls that come to it."""
        if finding not in self._known:
            self._known.add(finding)
            self.untold.append(finding)

    def __deepcopy__(self, memo: Any) -> Findings:
        return self

    def __reduce__(self) -> Any:
        return Findings, ()


def in_words(of_ranks: Sequence[Sequence[Finding]], is_wrong: bool) -> str:
    """What all ranks have found: each block once, by what the first rank says of it; empty if there is nothing."""
    said: dict[str, list[str]] = {}
    ranks: dict[str, list[str]] = {}
    for rank, findings in enumerate(of_ranks):
        for each in findings:
            if each.is_wrong == is_wrong and str(rank) not in ranks.setdefault(each.block, []):
                new = not ranks[each.block]
                ranks[each.block].append(str(rank))
                said.setdefault(each.words, []).extend([each.block] if new else [])
    return ". ".join(
        f"In {_listed([block or 'the whole model' for block in blocks])} (rank {_listed(ranks[blocks[0]])}): {words}"
        for words, blocks in said.items()
        if blocks
    )


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


@dataclass(frozen=True)
class Caller:
    """The block that is computed."""

    name: str
    block: nn.Module
    findings: Findings

    def name_of(self, held: Tensor, written: str) -> str:
        """In the block, for one of its parameters and buffers; else what stands in the graph.

        Args:
            written: What TorchDynamo calls it there, ``L_fn_self_modules_0_parameters_weight_``; by that it is found if
                the block is called with other tensors than it has, as it is where a strategy puts its own in.
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
    """Blocks that are being computed, the innermost last; a process may compute on several devices at once."""

    def __init__(self) -> None:
        self.open: list[Caller] = []
        self.asking = False
        """Whether a backend is asked for code that is compared already."""


_callers = _Callers()
_watching: list[Caller] = []
"""In whose name code is compared that others compile, the last first."""


@contextmanager
def called(caller: Caller) -> Iterator[None]:
    """Graphs that run in the block are those of ``caller``."""
    _callers.open.append(caller)
    try:
        yield
    finally:
        _callers.open.pop()


@contextmanager
def watched(model: nn.Module, findings: Findings) -> Iterator[None]:
    """Graphs that are made in the block are compared whoever asks for them: a task may compile its model itself."""
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
    """A backend for ``torch.compile``: another one, whose code is compared. Equal ones share their code."""

    backend: str
    mode: str | None

    @cached_property
    def _backend(self) -> Backend:
        # Compiled code then draws what the plain code draws.
        return backend_called(self.backend, self.mode, fallback_random=True)

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return _compared(self._backend, graph, examples)


def _compared(backend: Backend, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """The graph's compiled code, to be compared. With CUDA graphs the same code is tried without: a recording would
    take a trial for a pass of the model."""
    plain, other = plain_graph(graph), fx.GraphModule(graph, copy.deepcopy(graph.graph))
    unrecorded = without_cuda_graphs(backend)
    before, _callers.asking = _callers.asking, True
    try:
        tried = None if unrecorded is None else unrecorded(other, examples)
        compiled = backend(graph, examples)  # it may change the graph
    finally:
        _callers.asking = before
    made = Graph(name_of(backend), plain, compiled, tried or compiled, examples)
    return lambda *args: made(*args)


class Graph:
    """One graph, as it is called.

    Args:
        tried: The compiled code, as it is compared.
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
        self._comparison: Comparison | None = Comparison(plain, tried)
        self._changing = [at for at, each in enumerate(examples) if not isinstance(each, nn.Parameter)]
        self._sizes: set[Any] = set()
        self._calls = 0
        self._notes: list[tuple[str, bool]] = []
        """Words, and whether they are of something wrong."""
        self._give_up(_why_not(plain))

    def __call__(self, *args: Any) -> Any:
        caller = next(iter([*_callers.open[-1:], *_watching[-1:]]), None)
        if caller is None or active_fake_mode() is not None or _has_symbols(args):
            return self._run(*args)  # DDP has its pieces of a graph called without numbers first
        self._calls += 1
        if self._comparison is not None:
            sizes = tuple(_size(args[at]) for at in self._changing)
            if sizes not in self._sizes and self._is_time():
                self._sizes.add(sizes)
                self._compare(self._comparison, caller, args)
        for words, is_wrong in self._notes:
            caller.findings.add(Finding(caller.name, words, is_wrong))
        return self._run(*args)

    def _is_time(self) -> bool:
        often = len(self._sizes) == SIZES + self._calls // CALLS
        if often and (words := (_OFTEN, False)) not in self._notes:
            self._notes.append(words)
        return not often

    def _give_up(self, why: str | None) -> None:
        if why is not None:
            self._comparison = None
            self._notes.append((why, False))

    def _compare(self, comparison: Comparison, caller: Caller, args: Sequence[Any]) -> None:
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

    def _named(self, place: Place, caller: Caller, args: Sequence[Any]) -> str:
        if place.kind == "output":
            return f"output {place.at}"
        written = str(self._plain.graph.find_nodes(op="placeholder")[place.at].target)
        name = caller.name_of(args[place.at], written)
        return f"the gradient of {name}" if place.kind == "gradient" else f"what it leaves in {name}"


def _off(wrong: Wrong) -> str:
    """How far off, and how far rounding goes."""
    if math.isinf(wrong.apart):
        return "is of another shape or type, or not finite"
    return f"is {100 * wrong.apart:.3g} % off (rounding: {100 * wrong.floor:.0e} %)"


def _has_symbols(args: Sequence[Any]) -> bool:
    return any(isinstance(each, torch.SymInt) for each in args)


def _size(given: Any) -> Any:
    """What code may be compiled for, or may have been meant for."""
    return tuple(given.shape) if isinstance(given, Tensor) else given


def _counts(given: Any) -> bool:
    return isinstance(given, Tensor) and given.ndim > 0


def _why_not(graph: fx.GraphModule) -> str | None:
    """Why no rank may compute it a second time by itself and compare, if that is so."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and any(word in _home(node.target) for word in _SENDING):
            return f"it waits for other ranks in {node.target}"
    operator = unlike(graph)
    return None if operator is None else f"{operator} is another algorithm where it is not compiled"


def _home(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{function}"
