"""Records a few steps of a run with torch.profiler, one trace a rank, for Perfetto and Holistic Trace Analysis.

::

    step       0    1    2         3 ... 7           8
    profiler   -    -    warm-up   recorded (N = 5)  written
                                   ╰ ProfilerStep#3 ... ProfilerStep#7

A step of the trace holds all that happens until the next one begins: loading the next batch, the step itself, and
observers, checkpoints and evaluations after it. The first steps are left out: they compile, allocate, choose buckets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from evener.core.os_errors import os_error_message
from evener.core.text import from_here
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.torch_internals.profiling import all_threads, is_profiling
from evener.training.reporting.run_dir import PROFILE

WARM_UP = 3
"""Number of steps before the first that is recorded. The profiler itself runs in the last of them."""


@dataclass(frozen=True)
class ProfileOutcome:
    """What one rank has recorded."""

    text: str
    """Which steps were recorded, or why none were."""
    file: Path | None = None
    """The trace. None if there is none."""


class StepProfiler:
    """Records the first steps of a run after a warm-up, and writes them into the run directory.

    All ranks must create it together.

    Args:
        steps: Number of steps to record. None records nothing.
        about: What the trace says of the run.

    Raises:
        ConfigurationError: On all ranks, if there is no run directory or a rank cannot write there.
    """

    def __init__(
        self, steps: int | None, run_dir: Path | None, session: Session, about: Mapping[str, Any]
    ) -> None:
        self.outcome: ProfileOutcome | None = None
        """What was recorded. None until then, and if nothing is to be."""
        self._steps, self._session, self._about = steps, session, about
        self._is_due = steps is not None
        self._first: int | None = None
        self._last = -1
        self._profile: profile | None = None
        self._step: AbstractContextManager[object] | None = None
        if steps is not None:
            if run_dir is None:
                raise ConfigurationError(
                    f"profile={steps} writes traces into the run directory, and the run has none: name one with run_dir"
                )
            self._directory = run_dir / PROFILE
            refused = [said for said in session.control.gather_objects(self._refusal()) if said]
            if refused:
                raise ConfigurationError(f"profile={steps} cannot write its traces: {refused[0]}")

    def _refusal(self) -> str:
        """Returns why this rank cannot write; "" if it can."""
        probe = self._directory / f".rank{self._session.rank}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe.unlink(missing_ok=True)  # a link that others have put there would lead elsewhere
            probe.open("xb").close()
            probe.unlink()
        except OSError as error:
            return f"rank {self._session.rank}: {os_error_message(error)}"
        return ""

    def begin(self, step: int) -> None:
        """Called before each step, with its number."""
        if not self._is_due or self._steps is None:
            return
        if self._first is None:
            self._first = step + WARM_UP
        recording = self._step is not None
        if recording and (step != self._last + 1 or step == self._first + self._steps):
            self.close()  # all are recorded, or the run has gone back to a checkpoint
        elif step == self._first - 1:
            self._prepare()
        elif step == self._first or recording:
            self._next(step)

    def _prepare(self) -> None:
        if is_profiling():
            self._finish(
                "no step was profiled: another profiler of PyTorch records already, and there can be one"
            )
            return
        of_device = getattr(ProfilerActivity, self._session.device.type.upper(), ProfilerActivity.CPU)
        self._profile = profile(activities={ProfilerActivity.CPU, of_device}, **all_threads())
        self._profile.prepare_trace()

    def _next(self, step: int) -> None:
        assert self._profile is not None
        if self._step is None:
            self._profile.start_trace()
        else:
            self._step.__exit__(None, None, None)
        self._last = step
        mark: AbstractContextManager[object] = record_function(f"ProfilerStep#{step}")
        mark.__enter__()
        self._step = mark

    def close(self) -> None:
        """Writes what is recorded, unless it is written. Called at the end of the run, too."""
        if not self._is_due or self._steps is None:
            return
        made, step, self._profile, self._step = self._profile, self._step, None, None
        if made is None or step is None or self._first is None:
            if made is not None:
                made.start_trace()
                made.stop_trace()
            self._finish(f"no step was profiled: the run ended in the {WARM_UP} steps before, which warm up")
            return
        step.__exit__(None, None, None)
        steps = [*range(self._first, self._last + 1)]
        number = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        short = f" ({self._steps} were to be, and the run ended)" if len(steps) < self._steps else ""
        rank, world_size = self._session.rank, self._session.world_size
        if not dist.is_initialized():  # else torch says it
            made.add_metadata_json("distributedInfo", json.dumps({"rank": rank, "world_size": world_size}))
        made.add_metadata_json("evener", json.dumps({**self._about, "steps": steps}))
        made.stop_trace()
        file = self._directory / f"step-{steps[0]}" / f"rank{rank}.json.gz"
        with self._session.watchdog.phase("writing the profile", step=steps[-1]):
            try:
                _write(made, file)
            except (OSError, RuntimeError) as error:
                why = os_error_message(error) if isinstance(error, OSError) else str(error)
                self._finish(f"the profile of {number} could not be written: {why}")
            else:
                self._finish(f"profile of {number}{short}", file)

    def _finish(self, text: str, file: Path | None = None) -> None:
        self._is_due, self.outcome = False, ProfileOutcome(text, file)


def _write(made: profile, file: Path) -> None:
    """Writes a trace, which gets its name when it is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")
    partial.unlink(missing_ok=True)  # it may be a link, which PyTorch would follow
    made.export_chrome_trace(str(partial))
    os.replace(partial, file)


def profile_text(outcomes: Sequence[ProfileOutcome | None]) -> str:
    """Describes what the ranks have recorded, in their order; "" if nothing was to be."""
    texts: dict[str, list[tuple[int, ProfileOutcome]]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            texts.setdefault(outcome.text, []).append((rank, outcome))
    return "; ".join(_group_text(text, found, len(outcomes)) for text, found in texts.items())


def _group_text(text: str, found: Sequence[tuple[int, ProfileOutcome]], world_size: int) -> str:
    whose = "" if len(found) == world_size else f"rank {', '.join(str(rank) for rank, _ in found)}: "
    file = found[0][1].file
    if file is None:
        return f"{whose}{text}"
    name = file.name if len(found) == 1 else "rank*.json.gz, one for each rank"
    return f"{whose}{text} in {from_here(str(file.parent))}/{name}"
