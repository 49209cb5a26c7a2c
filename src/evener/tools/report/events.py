"""What happened in a run beside its steps: starts, saves and faults, evaluations, changes of shares, notes, merges."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from evener.core.os_errors import storage_errors
from evener.core.text import counted, shortened
from evener.errors import DataError
from evener.files import LONGEST_LINE, lines_of, open_regular, parsed
from evener.tools.report.schema import Attempt, Columns, EvaluationPoint, Merges, RunEvent, Series
from evener.tools.report.step_reader import number, numbers
from evener.tools.report.step_series import rounded

_FIRST, _LAST = 200, 200
"""Events that are kept: the first and the last ones."""
_EVALUATIONS = 2000
_LONGEST = 2000
_METRICS = 50
_FAULTS = ("death", "hang", "error")


class Happenings:
    """Collects what happened, from the records and from the attempts."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.start: dict[str, Any] = {}
        """The fields of `RunStart` of the last start."""
        self.saves: float | None = None
        """Seconds for which saves stopped training. None if not known."""
        self.number_of_saves = 0
        self.startup: float | None = None
        """Seconds of all starts. None if not known."""
        self.evaluations: list[EvaluationPoint] = []
        self.evaluation_seconds = 0.0
        self._every = 1
        self._evaluated = 0
        self._first: list[RunEvent] = []
        self._last = deque[RunEvent](maxlen=_LAST)
        self._left_out = 0
        self._faults: list[RunEvent] = []
        self._merges = self._merge_bytes = self._wasted = 0
        self._ages = Counter[int]()
        self._spreads: list[tuple[float, float]] = []

    # Attempts

    def read_attempts(self, path: Path) -> None:
        """Reads the file of starts, saves and faults, if there is one.

        Raises:
            DataError: If a line is no record.
            StorageError: If the file cannot be read.
        """
        if not path.exists():
            return
        with storage_errors(f"the starts in {path} cannot be read"), open_regular(path) as file:
            for line_number, line in enumerate(lines_of(file), 1):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break
                try:
                    self._add_attempt(parsed(line.decode()))
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError) as error:
                    raise DataError(f"{path}, line {line_number} is no record: {error}") from error

    def _add_attempt(self, record: dict[str, Any]) -> None:
        if record["kind"] == "save":
            self.saves = (self.saves or 0.0) + max(0.0, number(record["seconds"]))
            self.number_of_saves += 1
        elif record["kind"] == "fault" and len(self._faults) < _FIRST:
            cause = record["cause"] if record["cause"] in _FAULTS else "error"
            rank = record["rank"] if type(record["rank"]) is int else None
            self._faults.append(RunEvent(-1, cause, _words(record["words"]), rank))
        elif record["kind"] == "start" and len(self.attempts) < _FIRST:
            self._add_start(record)

    def _add_start(self, record: dict[str, Any]) -> None:
        run, step, seconds = record["run"], int(record["step"]), number(record["startup_seconds"])
        lost = int(record["lost_steps"])
        reason = ""
        if self._faults and self._faults[-1].step < 0:
            self._date_faults(step + lost)
            reason = self._faults[-1].words
        self.start = run if isinstance(run, dict) else {}
        self.saves = self.saves or 0.0
        if not math.isnan(seconds):
            self.startup = (self.startup or 0.0) + max(0.0, seconds)
        begun = datetime.fromtimestamp(number(record["started"]), UTC).isoformat(timespec="seconds")
        self.attempts.append(
            Attempt(
                step,
                int(np.nan_to_num(number(self.start.get("world_size", 0)))),
                begun,
                None if math.isnan(seconds) else rounded(seconds),
                lost,
                rounded(max(0.0, np.nan_to_num(number(record["lost_seconds"])))),
                reason,
            )
        )

    def _date_faults(self, step: int) -> None:
        """Gives the step to faults whose step is not known yet: a fault is written without it."""
        self._faults = [
            RunEvent(step, fault.kind, fault.words, fault.rank) if fault.step < 0 else fault
            for fault in self._faults
        ]

    # Records

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record that is not of a step.

        Raises:
            ValueError, TypeError, KeyError: If it is none.
        """
        kind, step = record["kind"], int(number(record["step"]))
        if kind == "evaluation":
            self._add_evaluation(step, record)
        elif kind == "decision":
            new, step = numbers(record["new_shares"]), int(number(record["effective_step"]))
            shares = tuple(rounded(share / sum(new)) for share in new[:1000]) if sum(new) > 0 else ()
            reason = _words(record.get("reason", ""))
            old = "/".join(str(round(share)) for share in numbers(record["old_shares"])[:8])
            now = "/".join(str(round(share)) for share in new[:8])
            self._happened(
                RunEvent(step, "shares", f"shares {old} become {now}: {reason}", None, shares, reason)
            )
        else:
            words = record.get("words")
            if words is None and kind == "skipped":
                words = f"{counted(len(record['samples']), 'sample')} of epoch {record['epoch'] + 1} could not be read"
            if words is not None:
                known = kind if kind in ("note", "skipped", "memory") else "note"
                self._happened(RunEvent(step, known, _words(words)))

    def _add_evaluation(self, step: int, record: dict[str, Any]) -> None:
        seconds = number(record["seconds"])
        self.evaluation_seconds += 0.0 if math.isnan(seconds) else max(0.0, seconds)
        self._evaluated += 1
        if self._evaluated % self._every:
            return
        if not isinstance(record["metrics"], dict):
            raise TypeError(f"a {type(record['metrics']).__name__} stands for the metrics")
        metrics = {
            str(name)[:200]: None if math.isnan(value := number(entry)) else rounded(value)
            for name, entry in list(record["metrics"].items())[:_METRICS]
        }
        samples, epoch = (int(np.nan_to_num(number(record[name]))) for name in ("samples", "epoch"))
        self.evaluations.append(
            EvaluationPoint(step, epoch, metrics, samples, rounded(np.nan_to_num(seconds)))
        )
        if len(self.evaluations) > _EVALUATIONS:
            self._every *= 2
            self.evaluations = self.evaluations[1::2]

    def _happened(self, event: RunEvent) -> None:
        if len(self._first) < _FIRST:
            self._first.append(event)
            return
        self._left_out += len(self._last) == _LAST
        self._last.append(event)

    def events(self, steps: int) -> Sequence[RunEvent]:
        """Returns all events in order.

        Args:
            steps: Steps of the run, after which a fault without a later start has happened.
        """
        self._date_faults(steps)
        starts = [RunEvent(attempt.step, "restart", _start_words(attempt)) for attempt in self.attempts[1:]]
        first = self._first.copy()
        if self._left_out:
            first.append(RunEvent(self._last[0].step, "note", f"{self._left_out:,} events are left out here"))
        first += self._last
        return sorted([*first, *self._faults, *starts], key=lambda event: event.step)

    # Merges

    def add_merges(self, record: dict[str, Any]) -> None:
        """Takes in the merges of a step that was kept."""
        merges, spread = record.get("merges") or [], record.get("merge_spread") or []
        if not (merges or spread or record.get("merge_bytes") or record.get("wasted")):
            return
        spread = numbers(spread)
        self._merges += len(merges) or len(spread)
        self._merge_bytes += int(np.nan_to_num(number(record.get("merge_bytes", 0))))
        self._wasted += int(np.nan_to_num(number(record.get("wasted", 0))))
        if len(spread) and np.isfinite(spread).all():
            self._spreads.append((number(record["step"]), float(np.mean(spread))))
        for place, held in enumerate(merges):
            self._ages.update(place - int(version) for _, version, *_ in held)

    def merges(self, summary: Mapping[str, Any], columns: Columns, every: float) -> Merges | None:
        """Returns how replicas merged. None if they met in each step.

        Args:
            every: Steps of the run for each one whose merges were taken in, which stand for all.
        """
        texts = [summary.get(name) for name in ("merging", "updates_of_server", "late_for_merges")]
        texts += [] if any(texts) else [self.start.get("merging")]
        words = tuple(line for text in texts if text for line in _words(text).splitlines())
        if not words and not self._merges:
            return None
        ages = Counter[int]()
        for age, count in self._ages.items():
            ages[max(0, age).bit_length()] += round(count * every)
        bounds = {power: (2**power // 2, 2**power - 1) for power in sorted(ages)}
        old = {
            f"{low}" if low == high else f"{low}-{high}": ages[power] for power, (low, high) in bounds.items()
        }
        number, nbytes, wasted = (
            round(each * every) for each in (self._merges, self._merge_bytes, self._wasted)
        )
        return Merges(words, number, nbytes, wasted, old, self._spread(columns))

    def _spread(self, columns: Columns) -> Series | None:
        if not self._spreads:
            return None
        steps, values = (np.array(each) for each in zip(*self._spreads, strict=True))
        at = np.searchsorted(np.array(columns.last), steps)
        found = [values[at == column] for column in range(len(columns.last))]
        minimum, mean, maximum = (
            tuple(rounded(float(reduce(each))) if len(each) else None for each in found)
            for reduce in (np.min, np.mean, np.max)
        )
        return Series("merge_spread", "1", minimum, mean, maximum)


def _start_words(attempt: Attempt) -> str:
    repeated = f", and repeated {counted(attempt.lost_steps, 'step')}" if attempt.lost_steps else ""
    ranks = counted(attempt.world_size, "rank")
    return f"the ranks started again after step {attempt.step:,}, with {ranks}{repeated}"


def _words(value: Any) -> str:
    return shortened(str(value), _LONGEST)
