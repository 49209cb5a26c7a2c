"""What is remembered of a run of a script: events in their order, each with the line of the script."""

from __future__ import annotations

import inspect
import linecache
import math
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from torch import Tensor

from evener.files import PACKAGE
from evener.tools.verify.trajectory import Sketches, Trajectory

_EVENER = str(PACKAGE.resolve()) + os.sep


class Line(NamedTuple):
    """A line of the script, or of a module beside it."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file) if self.file else '?'}:{self.number}"

    @property
    def source(self) -> str:
        """Its text; empty if it cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def told(self) -> str:
        """The line and its text."""
        return f"{self} `{self.source}`" if self.source else str(self)


class Lines:
    """Finds the innermost line of the user's own code: of files below the script's directory that were not installed.

    Args:
        home: The script's directory.
    """

    def __init__(self, home: Path) -> None:
        self._home = str(home) + os.sep
        self._known: dict[str, bool] = {}

    def here(self) -> Line:
        """The line that is being executed."""
        return self._of_frames(inspect.currentframe()) or Line("", 0)

    def is_own(self, file: str) -> bool:
        """Whether the file is the user's own code."""
        if file not in self._known:
            below = file.startswith(self._home) and not file.startswith(_EVENER)
            self._known[file] = below and "site-packages" not in file
        return self._known[file]

    def of_error(self, error: BaseException) -> Line | None:
        """The line at which the user's code raised it, or called what raised it."""
        found, trace = None, error.__traceback__
        while isinstance(trace, TracebackType):
            file = trace.tb_frame.f_code.co_filename
            found = Line(file, trace.tb_lineno) if self.is_own(file) else found
            trace = trace.tb_next
        return found

    def _of_frames(self, frame: FrameType | None) -> Line | None:
        while frame is not None:
            if self.is_own(frame.f_code.co_filename):
                return Line(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return None


class What(StrEnum):
    """What happens in a loop."""

    BATCH = "a batch"
    LOSS = "a loss"
    BACKWARD = "backward()"
    GRAD = "torch.autograd.grad"
    STEP = "an optimizer's step"


@dataclass
class Event:
    """Something that happened on a rank."""

    what: What
    line: Line
    value: float = math.nan
    """Of a loss or a root, NaN where it is not one number; of a batch the number that tells its samples from others."""
    dims: int = 0
    """Dimensions of what the loss returned."""
    gradients: Sketches = field(default_factory=dict)
    """Before an optimizer's step."""
    weights: Sketches = field(default_factory=dict)
    """After it; of a batch those that the loop has changed in the batch before without an optimizer."""
    rates: tuple[float, ...] = ()
    """Learning rates of the optimizer's groups."""
    of_weights: bool = False
    """Whether ``torch.autograd.grad`` is asked for a gradient of weights."""
    drew: bool = False
    """Whether random numbers were drawn between the loop's getting the batch at hand and this."""

    @property
    def place(self) -> tuple[What, Line]:
        """What happened where."""
        return self.what, self.line

    @property
    def is_update(self) -> bool:
        """Whether weights were changed."""
        return self.what is What.STEP or bool(self.weights)


@dataclass
class Printed:
    """A line of text that was printed."""

    text: str
    line: Line
    event: int
    """How many events came before it."""


@dataclass
class Record:
    """A run on one rank."""

    events: list[Event] = field(default_factory=list)
    printed: list[Printed] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the parameters of prepared models."""
    start: Sketches = field(default_factory=dict)
    """The weights when the first batch came."""
    end: Sketches = field(default_factory=dict)
    """Parameters and buffers of prepared models at the end."""
    digest: str = ""
    """Of their bits."""
    eps: float = 0.0
    """The unit in the last place, relative, of the coarsest type in which the models computed."""
    mixed: bool = False
    """Whether that is coarser than the weights' own, as under torch.autocast."""
    dropouts: int = 0
    """Modules that drop, and draw other masks on every rank."""
    norms: int = 0
    """BatchNorm layers of models that were not prepared, which computed in training mode."""
    prepared: bool = False
    """Whether evener.prepare was called with a model."""
    ended_by_limit: bool = False
    """Whether the run was ended after the number of steps that was asked for."""
    passes: int = 0
    """Passes through a prepared loader that trained and came to their end."""
    cut: bool = False
    """Whether the last of them was ended early."""
    failed_after_cut: bool = False
    """Whether the script failed after that."""

    @property
    def steps(self) -> int:
        """Steps of optimizers, or updates by hand."""
        return sum(event.is_update for event in self.events)

    def losses(self) -> list[float]:
        """The values of backward passes."""
        return [event.value for event in self.events if event.what is What.BACKWARD]

    def trajectory(self, stop: int | None = None) -> Trajectory:
        """The events before ``stop`` as steps of the proof; all of them, with the weights at the end, if it is None."""
        events = self.events[:stop]
        return Trajectory(
            losses=[event.value if event.what in _WITH_VALUE else 0.0 for event in events],
            weights=self.end if stop is None else {},
            digest=self.digest,
            shapes=self.shapes,
            gradients=[event.gradients for event in events],
            moved={name: float((value - self._start_of(name)).norm()) for name, value in self.end.items()},
            updated=[event.weights for event in events],
            places=[f"{event.what} at {event.line}" for event in events],
        )

    def _start_of(self, name: str) -> Tensor:
        """Zero for what was not there, or of another shape."""
        start, end = self.start.get(name, self.end[name] * 0), self.end[name]
        return start if start.shape == end.shape else end * 0


_WITH_VALUE = (What.LOSS, What.BACKWARD)
