"""Record of a script's run: events in order, each with its line of the script."""

from __future__ import annotations

import inspect
import linecache
import math
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from evener.data.batch import named_leaves
from evener.files import PACKAGE
from evener.tools.verify.trajectory import Sketches, Trajectory

_EVENER = str(PACKAGE.resolve()) + os.sep


Sizes = tuple[tuple[int, ...], ...]


class ScriptLine(NamedTuple):
    """A line of the script, or of a module in the script's directory."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file) if self.file else '?'}:{self.number}"

    @property
    def source(self) -> str:
        """Text of the line; empty if it cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def described(self) -> str:
        """The line's place and text, for messages."""
        return f"{self} `{self.source}`" if self.source else str(self)


class ScriptLines:
    """Finds the innermost line of the user's own code: files below the script's directory, except installed packages.

    Args:
        home: The script's directory.
    """

    def __init__(self, home: Path) -> None:
        self._home = str(home) + os.sep
        self._known: dict[str, bool] = {}

    def here(self) -> ScriptLine:
        """Returns the line that is being executed."""
        return self._of_frames(inspect.currentframe()) or ScriptLine("", 0)

    def is_own(self, file: str) -> bool:
        """Returns True if the file is the user's own code."""
        if file not in self._known:
            below = file.startswith(self._home) and not file.startswith(_EVENER)
            self._known[file] = below and "site-packages" not in file
        return self._known[file]

    def of_error(self, error: BaseException) -> ScriptLine | None:
        """Returns the innermost line of the user's code in the traceback. Returns None if there is none."""
        found, trace = None, error.__traceback__
        while isinstance(trace, TracebackType):
            file = trace.tb_frame.f_code.co_filename
            found = ScriptLine(file, trace.tb_lineno) if self.is_own(file) else found
            trace = trace.tb_next
        return found

    def _of_frames(self, frame: FrameType | None) -> ScriptLine | None:
        while frame is not None:
            if self.is_own(frame.f_code.co_filename):
                return ScriptLine(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return None


class What(StrEnum):
    """Kind of event in a training loop."""

    BATCH = "a batch"
    LOSS = "a loss"
    BACKWARD = "backward()"
    GRAD = "torch.autograd.grad"
    """Of weights; that of samples or of what is computed from weights is no event."""
    STEP = "an optimizer's step"


@dataclass
class Event:
    """An event on one rank."""

    what: What
    line: ScriptLine
    value: float = math.nan
    """Value of a loss or of a root of ``backward()``; NaN if it is not a scalar. For a batch, an identifier of its
    samples.
    """
    dims: int = 0
    """Number of dimensions of the loss."""
    gradients: Sketches = field(default_factory=dict)
    """Gradients before an optimizer step."""
    weights: Sketches = field(default_factory=dict)
    """Weights after an optimizer step. For a batch, the weights if the loop changed them by hand since the last
    batch.
    """
    rates: tuple[float, ...] = ()
    """Learning rates of the optimizer's parameter groups."""
    drew: bool = False
    """True if random numbers were drawn since the loop got the current batch."""
    sizes: Sizes = ()
    """Sizes of the tensors of a batch of a loader."""

    @property
    def place(self) -> tuple[What, ScriptLine]:
        """Kind and line of the event."""
        return self.what, self.line

    @property
    def is_update(self) -> bool:
        """True if weights were changed."""
        return self.what is What.STEP or bool(self.weights)


@dataclass
class Printed:
    """A line of text that the script printed."""

    text: str
    line: ScriptLine
    event: int
    """Number of events before it."""


@dataclass
class Record:
    """Record of a run on one rank."""

    events: list[Event] = field(default_factory=list)
    printed: list[Printed] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the parameters of prepared models, and of all parameters that an optimizer updated."""
    start: Sketches = field(default_factory=dict)
    """Weights when the first batch came."""
    end: Sketches = field(default_factory=dict)
    """Parameters and buffers of prepared models at the end."""
    digest: str = ""
    """Digest of the bits of all parameters and buffers at the end."""
    eps: float = 0.0
    """Relative unit in the last place of the coarsest dtype in which the models computed."""
    mixed: bool = False
    """True if that dtype is coarser than the dtypes of the weights, as under torch.autocast."""
    dropouts: int = 0
    """Number of modules with dropout that draws different masks on each rank."""
    norms: int = 0
    """Number of BatchNorm layers in training mode that belong to models which were not prepared."""
    prepared: bool = False
    """True if evener.prepare was called with a model."""
    ended_by_limit: bool = False
    """True if the run was ended after the requested number of steps."""
    passes: int = 0
    """Number of passes through a prepared loader that trained and ended, complete or cut short."""
    cut: bool = False
    """True if the last of these passes was cut short."""
    failed_after_cut: bool = False
    """True if the script failed after a pass was cut short."""
    sizes: Sizes = ()
    """Sizes of the tensors of the batch that the loop gets next."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps, or of updates without an optimizer."""
        return sum(event.is_update for event in self.events)

    def losses(self) -> list[float]:
        """Returns the values of the backward passes."""
        return [event.value for event in self.events if event.what is What.BACKWARD]

    def trajectory(self, stop: int | None = None) -> Trajectory:
        """Returns the events before ``stop`` as steps of a :class:`Trajectory`. None for all events and the final
        weights.
        """
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
        """Returns the start of a tensor; zeros if it did not exist then, or had another shape."""
        start, end = self.start.get(name, self.end[name] * 0), self.end[name]
        return start if start.shape == end.shape else end * 0


def sizes_of(batch: Any) -> Sizes:
    """Returns the sizes of the tensors of a batch."""
    return tuple(tuple(leaf.shape) for _, leaf in named_leaves(batch, "") if isinstance(leaf, Tensor))


_WITH_VALUE = (What.LOSS, What.BACKWARD)
