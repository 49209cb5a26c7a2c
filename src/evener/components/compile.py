"""Models that ``torch.compile`` makes faster: whole, or block by block.

What a model repeats is compiled once for all its blocks: they have the same code, and other weights. Shares of a batch
change, so that graphs are made for any number of samples; only 1 has one of its own. A graph that is made in mid-run
all the same takes seconds, which are no part of a rank's speed: the balancer does not learn from such a step.

Compiled code is compared with the code that it was made of, and a block of which it computes something else runs
uncompiled: see :mod:`evener.components.compile_check.graph`.

Compiled functions take the place of ``forward`` of single modules, inside of all that strategies and policies put
around them: no hook, no exchange of gradients and no autocast is part of a graph.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.compile_check.graph import Caller, Compared, Findings, called, in_words
from evener.components.repeated_blocks import repeated_blocks
from evener.data.batch import map_leaves
from evener.distributed.environment import detect
from evener.errors import ConfigurationError, DivergenceError
from evener.nn.fqn import clean_name
from evener.torch_internals.compiling import backend_called, compiled_so_far, with_any_size

BLOCKS, WHOLE, AUTO = "blocks", "whole", "auto"


@dataclass(frozen=True)
class Compiling:
    """How a model is compiled."""

    how: str | None = None
    """``blocks``, ``whole``, ``auto`` for the first where there are any, or None."""
    mode: str | None = None
    """``torch.compile``'s: such as ``reduce-overhead``, which replays a CUDA graph for each number of samples."""
    backend: str = "inductor"
    check: str = "replace"
    """What becomes of compiled code that differs from the code it was made of: ``replace`` computes with that instead,
    ``stop`` ends the run; ``no`` compares nothing."""

    def apply(self, model: nn.Module, kind: str, cut_open: bool = False) -> Graphs:
        """Compiles, when it is first called, what is to be compiled.

        Args:
            kind: Of device.
            cut_open: Whether no rank calls the model as one.

        Raises:
            ConfigurationError: If there is nothing of the kind, or no compiler.
        """
        findings, strict = Findings(), self.check == "stop"
        if self.how is None:
            return Graphs((), findings, strict)
        if kind == "cpu" and self.backend == "inductor":
            _check_compiler()
        names = self._chosen(model)
        if cut_open and names == ("",):
            raise ConfigurationError(
                f"compile={self.how} would compile {type(model).__name__} as a whole, which a pipeline cuts into "
                "stages: only blocks that the model repeats in an nn.ModuleList or nn.Sequential can be compiled there"
            )
        _lend_globals(model)
        for name in names:
            module = model.get_submodule(name)
            module.forward = Forward(module.forward, self, Caller(clean_name(name), module, findings))
        return Graphs(tuple(map(clean_name, names)), findings, strict)

    def _chosen(self, model: nn.Module) -> tuple[str, ...]:
        blocks = tuple(repeated_blocks(model)) if self.how != WHOLE else ()
        if self.how == BLOCKS and not blocks:
            raise ConfigurationError(
                "compile=blocks compiles modules that a model repeats in an nn.ModuleList or nn.Sequential, and "
                f"{type(model).__name__} has no two of one class there: use compile=whole"
            )
        return blocks or ("",)

    def function(self, forward: Any) -> Any:
        """``forward``, compiled when it is first called."""
        if self.check == "no":
            return torch.compile(
                forward, backend=backend_called(self.backend, self.mode, fallback_random=True)
            )
        return torch.compile(forward, backend=Compared(self.backend, self.mode))


class Forward:
    """In the place of the ``forward`` of a module."""

    def __init__(self, inner: Any, compiling: Compiling, caller: Caller) -> None:
        self._inner, self._compiling, self._caller = inner, compiling, caller
        self._function = compiling.function(inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._caller.name in self._caller.findings.uncompiled:
            return self._inner(*args, **kwargs)
        map_leaves(_mark, (args, kwargs))
        with called(self._caller):
            return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module compiles its own."""
        return Forward, (self._inner, self._compiling, self._caller)


def _lend_globals(model: nn.Module) -> None:
    """What the code of a script or a notebook refers to is put into the module that the code says it is from, where
    torch.compile looks for it: a class that came to this process by value has brought globals of its own."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for function in (value for kind in kinds for value in vars(kind).values()):
        if isinstance(function, FunctionType) and function.__globals__.get("__name__") in sys.modules:
            home = vars(sys.modules[function.__globals__["__name__"]])
            if home is not function.__globals__:
                home.update(function.__globals__ | home)


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.ndim:
        with_any_size(leaf)
    return leaf


class Graphs:
    """What was compiled on this rank.

    Args:
        names: Of the modules that are; none if nothing is to be compiled.
        findings: Of code that computes something else.
        strict: Whether that ends the run.
    """

    def __init__(
        self, names: tuple[str, ...] = (), findings: Findings | None = None, strict: bool = False
    ) -> None:
        self.names = names
        self.findings, self._strict = findings or Findings(), strict
        self._before = compiled_so_far() if names else None
        self._checked = False
        self._told_with: set[int] = set()

    @property
    def made(self) -> int:
        """Graphs so far."""
        return 0 if self._before is None else compiled_so_far().graphs - self._before.graphs

    @property
    def breaks(self) -> int:
        """Places so far at which code could not be compiled, so that a graph ends there."""
        return 0 if self._before is None else compiled_so_far().breaks - self._before.breaks

    @property
    def untold(self) -> int:
        """What this rank has found of compiled code, and other ranks do not know yet."""
        return len(self.findings.untold)

    @property
    def uncompiled(self) -> list[str]:
        """Blocks that are computed uncompiled on all ranks, for the compiled code of some rank was wrong."""
        return sorted(name or "the model" for name in self.findings.uncompiled)

    def heard(self, step: int) -> None:
        """Some rank has told with ``step`` that it has found something; all hear it."""
        self._told_with.add(step)

    def check(self, step: int, gather: Callable[[Any], list[Any]]) -> None:
        """In every update, when all ranks have heard what each told with the steps before.

        Args:
            gather: Brings together what all ranks tell; a collective call.

        Raises:
            ConfigurationError: After the first step, if no rank has compiled anything: nobody else would say so. One
                whose process has compiled before may have found all its graphs there.
            DivergenceError: As :meth:`agree`.
        """
        if self.names and not self._checked and not any(gather(compiled_so_far().graphs)):
            raise ConfigurationError(
                "compile: no graph was made in the first step, so that nothing is compiled: torch.compile gave up on "
                f"{', '.join(name or 'the model' for name in self.names[:4])}. TORCH_LOGS=graph_breaks says why; "
                "compile=blocks or compile=whole chooses other modules, or leave compile out"
            )
        heard = {each for each in self._told_with if each < step}
        self._told_with -= heard
        if heard or (self.names and not self._checked):
            self.agree(gather)
        self._checked = True

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """All ranks tell what they have found, and compute the same blocks uncompiled.

        Args:
            gather: Brings together what all ranks tell; a collective call.

        Raises:
            DivergenceError: If something is wrong, and that ends the run.
        """
        of_ranks = gather(self.findings.untold)
        self.findings.untold = []
        wrong, unknown = (in_words(of_ranks, is_wrong) for is_wrong in (True, False))
        if wrong and self._strict:
            raise DivergenceError(
                f"compile: compiled code computes something else than the model. {wrong}. With compile_check=replace "
                "the run goes on without that code, and compile_backend=aot_eager or no compile at all without any"
            )
        self.findings.uncompiled.update(each.block for found in of_ranks for each in found if each.is_wrong)
        if wrong:
            _warn(
                f"compile: compiled code computes something else than the model. {wrong}. It has not been used, and "
                "from here on all ranks compute these modules uncompiled"
            )
        if unknown:
            _warn(f"compile: this was not compared with the uncompiled model. {unknown}")


def _warn(words: str) -> None:
    """On rank 0, for all."""
    if detect().rank == 0:
        warnings.warn(words, stacklevel=3)


def _check_compiler() -> None:
    asked = os.environ.get("CXX")
    if not any(map(shutil.which, (asked,) if asked else ("g++", "clang++", "c++"))):
        raise ConfigurationError(
            f"compile needs a C++ compiler on a CPU, and there is no {asked or 'g++ or clang++'}: install one, name it "
            "in CXX, or leave compile out"
        )
