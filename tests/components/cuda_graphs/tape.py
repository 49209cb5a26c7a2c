"""A stand-in for CUDA graphs on a CPU: a tape of operators that is run again without Python.

As in a CUDA graph, every recorded tensor keeps its memory: a replay reads and writes it there, with the Python numbers
of the recording. Reading a number of a tensor fails while it records, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from evener.data.batch import tensors_in
from evener.torch_internals.dispatch import READS_NUMBER, DispatchMode

_Result = TypeVar("_Result")


class Tape(DispatchMode):
    """Records all operators in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any], list[Tensor]]] = []
        self.replays = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is READS_NUMBER:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, list(tensors_in(result))))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Autograd does not see what a graph writes: the versions of tensors stay."""
        self.replays += 1
        given = tuple(tensors_in([(args, kwargs, results) for _, args, kwargs, results in self.calls]))
        with torch.autocast("cpu", enabled=False), torch.autograd._unsafe_preserve_version_counter(given):
            for function, args, kwargs, results in self.calls:
                for static, new in zip(results, tensors_in(function(*args, **kwargs)), strict=True):
                    if static.data_ptr() != new.data_ptr():
                        static.detach().copy_(new)


class TapeRecorder:
    """Records tapes."""

    def __init__(self, device: torch.device) -> None:
        self.tapes: list[Tape] = []

    def warming_up(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, function: Callable[[], _Result]) -> tuple[_Result, Tape]:
        tape = Tape()
        with tape:
            found = function()
        self.tapes.append(tape)
        return found, tape
