"""What a run leaves behind: one JSON object a line while it runs, one summary at its end."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from evener.errors import DataError
from evener.files import LONGEST_LINE, dumps, lines_of, open_regular, parsed, replace_text


@dataclass(frozen=True)
class RunStart:
    """What a run is, known before its first step."""

    task: str
    settings: dict[str, Any]
    """The resolved settings, as JSON can hold them."""
    world_size: int
    batch_size: int
    total_steps: int | None
    """None if nobody knows."""
    steps_done: int
    """Steps that the run took before, if it goes on."""
    parts: tuple[int, ...] = ()
    """For each rank, which part of every batch it computes; if empty, each rank computes one of its own."""
    devices: tuple[str, ...] = ()
    """Of each rank."""
    parameters: int = 0
    """Numbers that are trained, of the whole model."""
    strategy: str = ""
    allreduce: str = ""
    """What sums the gradients; empty if that is not known yet."""
    run_dir: str | None = None
    shares: tuple[int, ...] = ()
    """Samples of the first batch, for each of its parts; empty where the data decide or nothing is divided."""
    learns: bool = False
    """Whether shares follow the speed of the ranks then."""


@dataclass(frozen=True)
class Note:
    """Something that the user must know."""

    kind: ClassVar[str] = "note"
    step: int
    words: str


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was left out."""

    kind: ClassVar[str] = "skipped"
    step: int
    words: str


@dataclass(frozen=True)
class MemoryRecord:
    """A rank takes its samples in pieces of another size from the next step on."""

    kind: ClassVar[str] = "memory"
    step: int
    words: str


@dataclass(frozen=True)
class StepRecord:
    """One training step, over all ranks."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: int
    loss: float
    samples: int
    seconds: float
    shares: tuple[int, ...]
    lr: float
    skipped: int = 0
    """Of the samples, those that could not be read and count for nothing."""
    compute_seconds: tuple[float, ...] = ()
    """Time of each rank's own work, up to its last gradient being ready."""
    wait_seconds: tuple[float, ...] = ()
    """Time for which each rank waited for others until all gradients were summed."""
    input_seconds: tuple[float, ...] = ()
    """Time for which each rank waited for samples, before the step."""
    memory_held: tuple[int, ...] = ()
    """Bytes in use on each rank: of a GPU by PyTorch's tensors; on a CPU by the process, or with a memory_limit by what
    that counts."""
    memory_peak: tuple[int, ...] = ()
    """The most that were in use since the step before. A process is looked at 20 times a second at most: since
    the last step with a look, whose numbers those in between have."""
    memory_reserved: tuple[int, ...] = ()
    """What PyTorch's allocator keeps of each GPU; empty without any."""
    memory_parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What each rank's ``memory_peak`` was made of, by category: ``parameters``, ``buffers``, ``gradients``,
    ``optimizer``, ``activations``, ``buckets``, ``inputs`` and ``other``, those that no rank has left out."""
    pieces: tuple[int, ...] = ()
    """The most samples of a pass that each rank has found room for, 0 for all of its share; empty if all have room."""
    graphs: tuple[int, ...] = ()
    """Graphs that each rank has compiled so far, where something is compiled; a step in which one was made is slow."""


@dataclass(frozen=True)
class SkippedRecord:
    """The samples of an epoch that could not be read."""

    kind: ClassVar[str] = "skipped"
    step: int
    epoch: int
    samples: list[dict[str, Any]]
    """Of each its rank, its number, and why."""

    @property
    def words(self) -> str:
        return f"epoch {self.epoch + 1}: {len(self.samples):,} samples could not be read and were skipped"


@dataclass(frozen=True)
class EvaluationRecord:
    """The metrics over the whole evaluation set, each sample counted once."""

    kind: ClassVar[str] = "evaluation"
    step: int
    epoch: int
    metrics: dict[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True)
class RunSummary:
    """How a run ended. ``seconds`` is the time of training alone, without start-up and evaluation."""

    task: str
    """Its name."""
    strategy: str
    """What divided the work."""
    world_size: int
    """Ranks at the end."""
    devices: list[str]
    """Of each rank."""
    steps: int
    """Updates in all, with those before a resume."""
    epochs: int
    """Epochs in all."""
    samples: int
    """Trained on in all, with those before a resume."""
    seconds: float
    """Of training alone, without start-up and evaluation."""
    samples_per_second: float
    """Of the samples in ``seconds``."""
    final_loss: float
    """Of the last step, over the whole batch."""
    metrics: dict[str, float]
    """Of the last evaluation, its loss among them; empty if there was none."""
    shares: list[float]
    """Which part of all samples each rank computed."""
    weights_digest: str
    """sha256 of all parameters and buffers: equal for equal bits."""
    versions: dict[str, str]
    """Of Evener, Python, torch and NumPy."""
    batch_size: int
    """Samples of a batch over all ranks."""
    seed: int
    """Of first weights and the order of samples."""
    ranks: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each rank: of its own work, of waiting for others, of waiting for input."""
    interrupted: bool = False
    """Whether it was asked to stop before its end."""
    run_dir: str | None = None
    """Where records, weights and checkpoints are; None if nothing was kept."""
    emulation: str = ""
    """How unequal devices were emulated, in words; empty if they were not."""
    allreduce: str = ""
    """What summed the gradients."""
    precision: str = ""
    """What the model computed in; empty if it was left as the task makes it."""
    memory: list[dict[str, int]] = field(default_factory=list)
    """Bytes on each rank: ``peak``, the most that were in use in a step, and what that was made of, by all categories,
    as in the records."""
    recompute: str = ""
    """What was computed again in backward to take less memory, in words; empty if nothing was."""
    offload: str = ""
    """What was kept outside of the device's memory, where, and how much at most, in words; empty if nothing was."""
    optimizer: str = ""
    """Which updates were fused, in words; empty if none were."""
    optimizer_state: str = ""
    """What keeps the optimizer's state in few bits, in words; empty if nothing does."""
    batch_norm: str = ""
    """How BatchNorm normalized, in words, if not by the samples of all ranks."""
    updates: str = ""
    """Which parameters were updated in backward, in words; empty if none were."""
    graphs: list[int] = field(default_factory=list)
    """Graphs that each rank has compiled in this run; empty if nothing was to be compiled."""
    uncompiled: list[str] = field(default_factory=list)
    """Modules that were computed uncompiled, because compiled code computed something else."""
    graph_breaks: int = 0
    """Places, over all ranks, at which a graph ended because code could not be compiled."""
    skipped_steps: int = 0
    """Steps whose update was left out, because something was not finite."""
    skipped: int = 0
    """Of the samples of this run, those that could not be read and count for nothing."""
    workers: list[int] = field(default_factory=list)
    """Processes that read for each rank, at the end."""
    samples_in_seconds: int = 0
    """Of the samples, those trained on since the start or the resume, which took ``seconds``."""
    sample_seconds: list[float] = field(default_factory=list)
    """Of each rank's own work for a sample, the median of the last steps; empty if they are few, or if ranks share
    samples."""
    reading: str = ""
    """Which rank waited for its batches longest, and what of that; empty if none did for long."""

    def __repr__(self) -> str:
        """In one line; all of it is `as_json`."""
        return f"<RunSummary of {self.words}>"

    @property
    def words(self) -> str:
        """What was trained, how far, and what came of it."""
        values = {"loss": self.final_loss} | self.metrics
        found = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        ranks = f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"
        broken_off = ", interrupted" if self.interrupted else ""
        return f"{self.task}: {self.steps:,} steps on {ranks} in {self.seconds:.1f} s{broken_off}, {found}"


def as_json(record: Any) -> dict[str, Any]:
    """The fields of a record, with its kind first where it has one."""
    kind = getattr(record, "kind", None)
    # Those of steps hold plain values, of which `asdict` would take copies, in ten times the time.
    fields = vars(record) if type(record) is StepRecord else dataclasses.asdict(record)
    return ({"kind": kind} if kind else {}) | fields


RECORDS = "records.jsonl"
"""The file of a run directory that holds them."""


class RecordFile:
    """A file of records, one JSON object a line, each line whole on disk as soon as it is written.

    Args:
        path: The file; what it held is replaced.
        steps_done: Steps that the run took before; of what the file held, the records of these are kept.
        evaluated: Whether an evaluation after the last of these steps is kept; else it will be done once more.
    """

    def __init__(self, path: Path, steps_done: int = 0, evaluated: bool = True) -> None:
        kept = _records_until(path, steps_done, evaluated) if steps_done and path.exists() else []
        replace_text(path, "".join(kept))
        steps = (record["step"] + 1 for record in map(json.loads, kept) if record["kind"] == StepRecord.kind)
        self.steps_done = max(steps, default=0)
        """So many steps are in what was kept; something else may be told of one before the step itself is."""
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, record: Any) -> None:
        """Raises:
        OSError: If there is no room for it; the file then holds what it held before. If the file was removed or moved.
        """
        self._check_place()
        line = memoryview((dumps(as_json(record)) + "\n").encode())
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(whole)
            raise

    def _check_place(self) -> None:
        """What is written to a file that was removed is nowhere, and nothing else says so."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        raise FileNotFoundError(
            errno.ENOENT, "it was removed or moved while the run wrote it", str(self._path)
        )

    def close(self) -> None:
        self._file.close()


def _records_until(path: Path, steps_done: int, evaluated: bool) -> list[str]:
    """Lines of the first steps; a run that was killed has written more of them than its checkpoint knows."""
    repeated = None if evaluated else (EvaluationRecord.kind, steps_done)
    kept = []
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file), 1):
            if (
                not line.endswith(b"\n") and len(line) < LONGEST_LINE
            ):  # of a run that was killed while it wrote
                break
            try:
                record = parsed(line.decode())
                if _steps_at(record) <= steps_done and (record["kind"], record["step"]) != repeated:
                    kept.append(line.decode())
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise DataError(
                    f"{path}, line {number} is no record: {error}; take the line out, or go on in another directory, "
                    "with --run-dir"
                ) from error
    return kept


def _steps_at(record: dict[str, Any]) -> int:
    """Steps that were done when the record was written."""
    return int(record["step"]) + int(record["kind"] in (StepRecord.kind, SkippedStep.kind))
