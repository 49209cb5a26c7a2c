"""Compiles models with ``torch.compile``, as a whole or block by block.

Repeated blocks of a model have the same code and different weights, so that they are compiled once. Load balancing
changes the number of samples, so that graphs are compiled for any number; only the number 1 gets a graph of its own. If
a graph is compiled in mid-run all the same, it takes seconds, which do not count as the rank's speed: the balancer
ignores such a step.

The results of compiled code are compared with those of the original code. A block with wrong results runs uncompiled:
see :mod:`evener.components.compile_check.graph`.

Compiled functions replace the ``forward`` of single modules, inside everything that strategies and precision policies
wrap around them. So hooks, gradient synchronization and autocast are in no graph.
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

from evener.components.compile_check.graph import Caller, Compared, Findings, called, findings_text
from evener.components.repeated_blocks import repeated_blocks
from evener.data.batch import map_leaves
from evener.distributed.environment import detect
from evener.errors import ConfigurationError, DivergenceError
from evener.nn.fqn import clean_name
from evener.torch_internals.compiling import backend_called, compiled_so_far, with_any_size

BLOCKS, WHOLE, AUTO = "blocks", "whole", "auto"


@dataclass(frozen=True)
class Compiling:
    """Settings for compiling a model."""

    how: str | None = None
    """``blocks`` compiles repeated blocks, ``whole`` the whole model, ``auto`` blocks if there are any. None compiles
    nothing."""
    mode: str | None = None
    """The mode of ``torch.compile``: for example ``reduce-overhead``, which replays a CUDA graph for each number of
    samples."""
    backend: str = "inductor"
    check: str = "replace"
    """Reaction to compiled code with wrong results: ``replace`` runs the original code instead, ``stop`` ends the run,
    ``no`` makes no comparison."""

    def apply(self, model: nn.Module, kind: str, cut_open: bool = False) -> Graphs:
        """Replaces the ``forward`` of the chosen modules by functions that are compiled at their first call.

        Args:
            kind: The type of device.
            cut_open: True if a pipeline divides the model, so that no rank calls it as a whole.

        Raises:
            ConfigurationError: If there is nothing to compile, or no C++ compiler.
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
            module.forward = CompiledForward(module.forward, self, Caller(clean_name(name), module, findings))
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
        """Returns ``forward`` as a function that is compiled at its first call."""
        if self.check == "no":
            return torch.compile(
                forward, backend=backend_called(self.backend, self.mode, fallback_random=True)
            )
        return torch.compile(forward, backend=Compared(self.backend, self.mode))


class CompiledForward:
    """Replaces the ``forward`` of a module by compiled code."""

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
        """Makes a copied module compile its own function."""
        return CompiledForward, (self._inner, self._compiling, self._caller)


def _lend_globals(model: nn.Module) -> None:
    """Copies the globals of the modules' functions into the Python module that the functions name as their own, where
    torch.compile looks them up. Needed for classes of a script or notebook that were pickled by value: they bring
    globals of their own."""
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
    """The compiled modules of this rank.

    Args:
        names: The names of the compiled modules. Empty if nothing is to be compiled.
        findings: Wrong results of compiled code.
        strict: True if wrong results end the run.
    """

    def __init__(
        self, names: tuple[str, ...] = (), findings: Findings | None = None, strict: bool = False
    ) -> None:
        self.names = names
        self.findings, self._strict = findings or Findings(), strict
        self._before = compiled_so_far() if names else None
        self._checked = False
        self._told_with: set[int] = set()
        self._slow = 0

    def slowed(self) -> None:
        """Counts a CUDA graph that is recorded or compared, which takes time as compiling does."""
        self._slow += 1

    @property
    def made(self) -> int:
        """The number of graphs so far: compiled ones, and CUDA graphs recorded or compared."""
        return self._slow + (0 if self._before is None else compiled_so_far().graphs - self._before.graphs)

    @property
    def breaks(self) -> int:
        """The number of graph breaks so far: places where code could not be compiled."""
        return 0 if self._before is None else compiled_so_far().breaks - self._before.breaks

    @property
    def untold(self) -> int:
        """The number of findings on this rank that other ranks do not know yet."""
        return len(self.findings.untold)

    @property
    def uncompiled(self) -> list[str]:
        """The blocks that all ranks run uncompiled, because compiled code was wrong on some rank."""
        return sorted(name or "the model" for name in self.findings.uncompiled)

    def heard(self, step: int) -> None:
        """Records that some rank has reported a finding with ``step``. Called on all ranks."""
        self._told_with.add(step)

    def check(self, step: int, gather: Callable[[Any], list[Any]]) -> None:
        """Called in every update, on all ranks, after they have received each other's messages of earlier steps.

        Args:
            gather: Gathers an object of every rank; a collective call.

        Raises:
            ConfigurationError: After the first step, if no rank has compiled a graph. A process that compiled before
                may have reused its graphs.
            DivergenceError: As :meth:`agree`.
        """
        if self._checked and not self._told_with:
            return
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
        """Exchanges the findings of all ranks, so that all run the same blocks uncompiled. All ranks must call this
        together.

        Args:
            gather: Gathers an object of every rank; a collective call.

        Raises:
            DivergenceError: If results are wrong and ``compile_check=stop``.
        """
        of_ranks = gather(self.findings.untold)
        self.findings.untold = []
        wrong, unknown = (findings_text(of_ranks, is_wrong) for is_wrong in (True, False))
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


def _warn(message: str) -> None:
    """Warns on rank 0 only."""
    if detect().rank == 0:
        warnings.warn(message, stacklevel=3)


def _check_compiler() -> None:
    asked = os.environ.get("CXX")
    if not any(map(shutil.which, (asked,) if asked else ("g++", "clang++", "c++"))):
        raise ConfigurationError(
            f"compile needs a C++ compiler on a CPU, and there is no {asked or 'g++ or clang++'}: install one, name it "
            "in CXX, or leave compile out"
        )
