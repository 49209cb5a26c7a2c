"""What happens where a number is asked of a tensor that has none.

A loss that is looked at for being finite, the step count of an optimizer: such numbers say nothing of memory, and 1
does for all of them. A whole number or a place that depends on numbers does say something of memory, as a rule the size
of a tensor, and is refused: an estimate that goes on with a made-up size would be wrong and not say so. Where the
user's own code asks for a number, it may choose between two ways by it, and the estimate says that it went one.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from evener.errors import ConfigurationError
from evener.files import PACKAGE
from evener.tools.estimate.onednn_workspace import RECURRENT, with_workspace
from evener.torch_internals.dispatch_mode import READS_NUMBER, DispatchMode, wraps
from evener.torch_internals.fake_tensors import depends_on_numbers

_TORCH, _EVENER = str(Path(torch.__file__).parent), str(PACKAGE)

_PYTHON = str(Path(inspect.__file__).parent)
_ON_THE_WAY = (
    __file__,
    _PYTHON,
    *(f"{_EVENER}/{part}" for part in ("hardware/memory/", "torch_internals/", "nn/")),
)

_SAME = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)


class Answers(DispatchMode):
    """Answers for tensors without numbers, and for the ranks at the other end of a group.

    Raises:
        ConfigurationError: Where an answer would be made up that memory depends on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()
        """Lines of the user's own that asked for a number."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wraps, types)):
            return NotImplemented
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
            raise ConfigurationError(
                f"memory cannot be known before the run: {function} at {place or 'a place in a library'} depends on "
                "the numbers in a tensor, and how much is made then may too. Measure it in a run"
            ) from error
        if place:
            self.asked.add(place)
        return answer


def _is_no_size(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype is torch.bool


def line_of_user() -> str | None:
    """The innermost line that is not PyTorch's, if it is not Evener's either."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, "<", *_ON_THE_WAY)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_EVENER):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
