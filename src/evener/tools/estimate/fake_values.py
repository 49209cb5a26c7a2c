"""Answers when code asks for the value of a tensor that has none.

Some values do not affect memory, such as a loss that is checked for being finite, or the step count of an optimizer.
Then the answer is 1. An integer or an index that depends on values usually is the size of a tensor. It is refused, for
an estimate with an invented size would be wrong without saying so. If the user's own code asks for a value, it may
branch on it; the estimate then notes the line, since only one branch was taken.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from evener.files import PACKAGE
from evener.tools.estimate.onednn_workspace import RECURRENT, with_workspace
from evener.tools.estimate.unknown import UnknownMemoryError
from evener.torch_internals.dispatch import READS_NUMBER, DispatchMode, depends_on_numbers, wraps

_TORCH, _EVENER = str(Path(torch.__file__).parent), str(PACKAGE)

_PYTHON = str(Path(inspect.__file__).parent)
_ON_THE_WAY = (
    __file__,
    _PYTHON,
    *(
        f"{_EVENER}/{part}"
        for part in ("hardware/memory/", "torch_internals/", "nn/", "tools/estimate/traffic.py")
    ),
)

_SAME = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)


class FakeValues(DispatchMode):
    """Dispatch mode that answers for the values of tensors that have none.

    Raises:
        UnknownMemoryError: If memory would depend on an invented answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()
        """Lines of the user's code that asked for a value."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wraps, types)):
            return NotImplemented
        if function.namespace == "c10d" and isinstance(args[0], list) and any(map(_is_sparse, args[0])):
            raise UnknownMemoryError(
                "memory cannot be known before the run: gradients of embeddings with sparse=True are summed over "
                "ranks, and how many rows the sum has depends on the samples. Measure it in a run, or leave "
                "sparse=True out"
            )
        try:
            found = function(*args, **(kwargs or {}))
        except Exception as error:
            if not depends_on_numbers(error):
                raise
            return self._answer(function, args, error)
        return with_workspace(found, args) if function is RECURRENT else found

    def _answer(self, function: Any, args: Any, error: Exception) -> Any:
        place = line_of_user()
        if function in _SAME:
            answer: Any = True
        elif function is READS_NUMBER and _is_no_size(args[0]):
            answer = True if args[0].dtype is torch.bool else 1.0
        else:
            raise UnknownMemoryError(
                f"memory cannot be known before the run: {function} at {place or 'a place in a library'} depends on "
                "the numbers in a tensor, and how much is made then may too. Measure it in a run"
            ) from error
        if place:
            self.asked.add(place)
        return answer


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.sparse_coo


def _is_no_size(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype is torch.bool


def line_of_user() -> str | None:
    """Returns ``FILE:LINE`` of the user's code that is being executed, skipping frames of PyTorch and the standard
    library.

    Returns None if the innermost remaining frame belongs to Evener.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, "<", *_ON_THE_WAY)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_EVENER):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
