"""Writes a run's live figures as a text file for Prometheus.

node_exporter's textfile collector, or another agent that reads such files, passes the figures on. The file is replaced
as a whole, so that no reader sees a part of it. Times come as sums: Prometheus computes rates from them over any
window, such as ``rate(evener_samples_total[1m])`` for samples per second.

The labels are bounded: the name of the file on all figures, since node_exporter refuses a figure that two files have
alike, and beside it at most a rank, a metric of the evaluation or a state. None of them grows with the steps.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evener.core.config.validation import check_metrics_file
from evener.core.observer import Observer
from evener.core.os_errors import os_error_message, storage_errors
from evener.core.records import EvaluationRecord, RunStart, RunSummary, SkippedStep, StepRecord
from evener.core.stdio import to_stderr
from evener.core.text import from_here, printable, shortened
from evener.files import replace_text
from evener.version import evener_version

PERIOD_SECONDS = 5.0
"""Minimum time between two writes, but for the last one."""
RUNNING, COMPLETED, INTERRUPTED, FAILED = STATES = ("running", "completed", "interrupted", "failed")
_LONGEST_LABEL = 200
_FAMILIES = {
    "run_info": ("gauge", "Always 1; the labels tell task, strategy and version of Evener."),
    "run_state": (
        "gauge",
        "1 for the state of the run, 0 for the others. A run that was killed stays running.",
    ),
    "run_start_time_seconds": ("gauge", "Unix time at the first step of this start."),
    "last_step_time_seconds": ("gauge", "Unix time at which the last step was known."),
    "ranks": ("gauge", "Ranks of the run."),
    "steps_done": ("gauge", "Steps of the training, also those before a resume."),
    "steps_planned": ("gauge", "Steps of the whole training."),
    "epochs_begun": ("gauge", "Epochs of the training, also the one under way."),
    "train_loss": ("gauge", "Loss of the last step, over the whole batch."),
    "learning_rate": ("gauge", "Learning rate of the last step."),
    "evaluation": ("gauge", "Metrics of the last evaluation."),
    "steps_total": ("counter", "Steps since this start."),
    "samples_total": ("counter", "Samples trained on since this start."),
    "step_seconds_total": ("counter", "Seconds of these steps."),
    "evaluation_seconds_total": ("counter", "Seconds of evaluations since this start."),
    "skipped_samples_total": ("counter", "Samples that could not be read, since this start."),
    "skipped_steps_total": ("counter", "Steps without an update, since a value was not finite."),
    "rank_compute_seconds_total": ("counter", "Seconds that the rank computed."),
    "rank_wait_seconds_total": (
        "counter",
        "Seconds that the rank waited for others and for sums of gradients.",
    ),
    "rank_input_seconds_total": ("counter", "Seconds that the rank waited for samples."),
    "rank_share_ratio": ("gauge", "Part of the last batch that the rank had, from 0 to 1."),
    "rank_memory_bytes": ("gauge", "Memory in use on the rank."),
    "rank_memory_peak_bytes": ("gauge", "Most memory in use on the rank since this start."),
}
"""Each figure with its type and its help text."""


class MetricsFile(Observer):
    """Writes live figures for Prometheus at most every five seconds, and at the end.

    Args:
        path: The file; its name ends with ``.prom``. An existing one is replaced.
        say: Called with a remark if the file cannot be written later on. The run continues without it.

    Raises:
        ConfigurationError: If the name ends otherwise.
        StorageError: At the start, if the file cannot be written, or its directory does not exist.
    """

    def __init__(self, path: str | Path, say: Callable[[str], None] = to_stderr) -> None:
        self._path, self._say = Path(path), say
        check_metrics_file(self._path)
        self._values: defaultdict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
        self._written = -math.inf
        self._fails = False

    def start(self, run: RunStart) -> None:
        self._values.clear()
        self._parts = run.parts
        self._set("run_info", 1, task=run.task, strategy=run.strategy, version=evener_version())
        self._set("run_start_time_seconds", time.time())
        self._set("ranks", run.world_size)
        self._set("steps_done", run.steps_done)
        if run.total_steps is not None:
            self._set("steps_planned", run.total_steps)
        for name, (kind, _) in _FAMILIES.items():
            if kind == "counter" and not name.startswith("rank_"):
                self._add(name, 0)
        self._state(RUNNING)
        with storage_errors(f"the metrics file {self._path} cannot be written"):
            self._replace()

    def step(self, record: StepRecord) -> None:
        self._set("last_step_time_seconds", time.time())
        self._set("steps_done", record.step + 1)
        self._set("epochs_begun", record.epoch + 1)
        self._set("train_loss", record.loss)
        self._set("learning_rate", record.lr)
        self._add("steps_total", 1)
        self._add("samples_total", record.samples)
        self._add("step_seconds_total", record.seconds)
        self._add("skipped_samples_total", record.skipped)
        divided = record.costs or record.shares
        whole = sum(divided) or 1
        parts = self._parts or range(len(divided))
        self._set_each("rank_share_ratio", [divided[part] / whole for part in parts] if divided else [])
        for part in ("compute", "wait", "input"):
            for rank, seconds in enumerate(getattr(record, f"{part}_seconds")):
                self._add(f"rank_{part}_seconds_total", seconds, rank=str(rank))
        self._set_each("rank_memory_bytes", record.memory_held)
        known = self._values["rank_memory_peak_bytes"].values()
        peaks = map(max, record.memory_peak, known) if known else record.memory_peak
        self._set_each("rank_memory_peak_bytes", list(peaks))
        self._write()

    def evaluation(self, record: EvaluationRecord) -> None:
        for name, value in record.metrics.items():
            self._set("evaluation", value, metric=name)
        self._add("evaluation_seconds_total", record.seconds)
        self._write()

    def event(self, record: Any) -> None:
        self._add("skipped_steps_total", isinstance(record, SkippedStep))

    def end(self, summary: RunSummary | None) -> None:
        self._state(FAILED if summary is None else INTERRUPTED if summary.interrupted else COMPLETED)
        self._write(last=True)

    def _state(self, state: str) -> None:
        for each in STATES:
            self._set("run_state", each == state, state=each)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._values[name][tuple(labels.items())] = value

    def _set_each(self, name: str, values: Sequence[float]) -> None:
        for rank, value in enumerate(values):
            self._set(name, value, rank=str(rank))

    def _add(self, name: str, value: float, **labels: str) -> None:
        found, key = self._values[name], tuple(labels.items())
        found[key] = found.get(key, 0) + value

    def _write(self, last: bool = False) -> None:
        if not last and time.monotonic() - self._written < PERIOD_SECONDS:
            return
        try:
            self._replace()
            self._fails = False
        except OSError as error:
            if not self._fails:
                where = f"evener: the metrics file {from_here(self._path)} cannot be written"
                self._say(f"{where}: {os_error_message(error)}. The run goes on, and tries again")
            self._fails = True

    def _replace(self) -> None:
        self._written = time.monotonic()
        os.stat(self._path.parent)  # a missing directory is an error, and not made
        replace_text(self._path, self.text(), follow=True)

    def text(self) -> str:
        """Returns the figures in Prometheus's text format, version 0.0.4."""
        lines = []
        for name, (kind, about) in _FAMILIES.items():
            found = self._values.get(name)
            if found:
                lines += [f"# HELP evener_{name} {about}", f"# TYPE evener_{name} {kind}"]
            for labels, value in (found or {}).items():
                pairs = ",".join(
                    f'{key}="{_escaped(text)}"' for key, text in (("run", self._path.stem), *labels)
                )
                lines.append(f"evener_{name}{{{pairs}}} {_number(value)}")
        return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    """Returns a label's value as the format has it, with control characters shown and of bounded length."""
    return (
        shortened(printable(text), _LONGEST_LABEL)
        .replace("\\", r"\\")
        .replace('"', r"\"")
        .replace("\n", r"\n")
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
