"""The data of a report: what ``report.json`` holds, and all that the page is made from.

The sizes are bounded: a run of a million steps has as many columns as one of a thousand, and each column keeps the
minimum, mean and maximum of its steps, so that no spike is lost. Seconds are wall-clock seconds, sizes are bytes,
steps are counted from 0, and ``None`` stands for a number that is not known. Tuples "by rank" have one entry for each
rank, in order. A field that a later version adds has a default, so that readers of the same version go on to work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FORMAT = "evener-report"
"""The value of ``format`` in the file."""
VERSION = 1
"""The value of ``version`` in the file. It is increased when a field goes or gets another meaning."""

FINISHED, INTERRUPTED, UNDER_WAY, BROKEN_OFF = "finished", "interrupted", "under way", "broken off"
"""States of a run. ``broken off``: it has no summary, and no process writes to its directory."""

COMPUTE, WAITING, COMMUNICATION, INPUT = "compute", "waiting", "communication", "input"
"""The parts of a step."""

LOSS, LR, THROUGHPUT, STEP_SECONDS, SHARE, MEMORY = "loss", "lr", "throughput", "step", "share", "memory"
FORWARD, BACKWARD = "forward", "backward"
"""Names of series, beside the parts of a step."""


@dataclass(frozen=True)
class RunIdentity:
    """What the run is, and how it was started."""

    name: str
    """Name of the run directory."""
    task: str
    strategy: str
    world_size: int
    """Number of ranks at the end."""
    devices: tuple[str, ...]
    """Device of each rank; empty if not known."""
    state: str
    """One of ``finished``, ``interrupted``, ``under way`` and ``broken off``."""
    steps: int
    """Steps done in all, including those before a resume."""
    samples: int
    """Samples of the steps in the records."""
    seconds: float
    """Seconds of training: those of all steps in the records."""
    batch_size: int | None = None
    """Global batch size in samples. None if not known."""
    total_steps: int | None = None
    """Steps that the run was to take. None if not known."""
    epochs: int = 0
    allreduce: str = ""
    """The all-reduce that summed the gradients; empty if not known."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Resolved settings."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Evener, Python, torch and NumPy."""
    started: str | None = None
    """Time of the first start in UTC, as ISO 8601. None if not known."""
    command: str = ""
    """A command that reproduces the run; empty if there is none."""
    weights_digest: str = ""
    """sha256 of the final weights; empty if not known."""
    run: str = ""
    """Random name of the run, from its mark."""
    notes: tuple[str, ...] = ()
    """Further facts from the summary, in words: precision, recomputation, offloading, compiled graphs and so on."""
    learns: bool = False
    """True if shares were adapted to the speed of the ranks."""
    plain_script: bool = False
    """True if a script of the user's own was observed, which Evener has not divided."""


@dataclass(frozen=True)
class Cause:
    """One cause of lost time, or one fault, with its evidence."""

    kind: str
    """One of `evener.tools.report.verdict.KINDS`, such as ``slow forward``, ``slow link`` or ``death``."""
    words: str
    """One sentence with numbers."""
    rank: int | None = None
    """The rank that is the cause. None if it is not a single rank."""
    seconds: float | None = None
    """Seconds of the run that were lost by it."""
    fraction: float | None = None
    """``seconds`` as a fraction of the time of the steps or, for what happens between them, of the training."""
    advice: str = ""
    """The next step, such as ``--balance auto``; empty if no step follows from the numbers."""
    gain: float | None = None
    """Predicted speedup by the advice, such as 1.18. None if it cannot be computed."""


@dataclass(frozen=True)
class Verdict:
    """What the run spent its time on, and what to do next."""

    words: str
    """One or two sentences with numbers."""
    healthy: bool
    """True if nothing stands out; then there are no causes."""
    causes: tuple[Cause, ...] = ()
    """Faults first, then by lost seconds."""


@dataclass(frozen=True)
class Goodput:
    """Where the wall-clock time of all attempts went, in seconds. The parts of a step are means over the ranks, and add
    up to the time of the steps together with ``other``."""

    startup: float | None = None
    """From the start of the ranks to their first step, over all attempts."""
    compute: float = 0.0
    """Forward and backward passes."""
    communication: float = 0.0
    """Gradient synchronization that compute did not hide: what the rank that waited least waited."""
    waiting: float = 0.0
    """Waiting for slower ranks."""
    input: float = 0.0
    """Waiting for samples."""
    checkpoints: float | None = None
    """Time for which saving stopped training."""
    saves: int | None = None
    """Number of these saves."""
    evaluation: float = 0.0
    lost_steps: float = 0.0
    """Steps that were repeated after a restart."""
    other: float = 0.0
    """Optimizer, schedulers, records and all that the times above leave out."""

    @property
    def total(self) -> float:
        """All accounted seconds."""
        parts = (self.startup or 0.0, self.compute, self.communication, self.waiting, self.input)
        return sum((*parts, self.checkpoints or 0.0, self.evaluation, self.lost_steps, self.other))

    @property
    def fraction(self) -> float:
        """Goodput: compute as a fraction of all accounted time, from 0 to 1."""
        return self.compute / self.total if self.total else 0.0


@dataclass(frozen=True)
class Series:
    """One quantity over the columns of the report. Columns without a value have None in all three."""

    name: str
    """``loss``, ``lr``, ``throughput`` (samples/s), ``step`` (seconds), ``share`` (fraction of the batch), ``compute``,
    ``waiting``, ``communication``, ``input``, ``forward``, ``backward`` (seconds a step) or ``memory`` (peak bytes)."""
    unit: str
    """``""``, ``samples/s``, ``s``, ``1`` (a fraction) or ``B``."""
    minimum: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    maximum: tuple[float | None, ...]
    rank: int | None = None
    """The rank. None for a quantity of the whole run; for one that ranks have, then over all ranks."""


@dataclass(frozen=True)
class Columns:
    """The steps of each column: from ``first`` up to and including ``last``."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankTotals:
    """What one rank did, over all steps whose times by rank are known."""

    rank: int
    device: str
    share: float
    """Fraction of all samples, from 0 to 1."""
    compute: float
    """Seconds."""
    waiting: float
    """Seconds of waiting for slower ranks."""
    communication: float
    """Seconds of gradient synchronization that compute did not hide."""
    input: float
    """Seconds of waiting for samples."""
    forward: float | None = None
    """Seconds of forward passes, a part of ``compute``. None if not measured."""
    backward: float | None = None
    """Seconds of backward passes, a part of ``compute``. None if not measured."""
    sample_seconds: float | None = None
    """Median compute seconds per sample. None if the rank had none."""
    slowest: float | None = None
    """Fraction of the steps in which it took longer than all other ranks, from 0 to 1."""
    threads: int | None = None
    """Threads of PyTorch in an operation."""
    workers: int | None = None
    """Processes that loaded its samples."""
    host: str = ""
    """Name of its host; empty if not known."""
    cores: int | None = None
    """Cores that its host lets it use, together with the other ranks there."""
    queued: float | None = None
    """Part of the time in which its threads could compute for which they had no core, from 0 to 1. None if unknown."""
    queued_seconds: float | None = None
    """Seconds of this waiting for a core, summed over its threads."""
    link_seconds: float | None = None
    """Seconds for a message to the next rank and back, the last rank's to rank 0, measured at the end of training. None
    if not measured."""
    medians: dict[str, float] = field(default_factory=dict)
    """Median seconds of a step, without the first ones: ``compute``, ``waiting``, ``communication``, ``input``, and
    ``forward`` and ``backward`` if measured."""


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation."""

    step: int
    """Steps done before it."""
    epoch: int
    metrics: dict[str, float | None]
    samples: int
    seconds: float


@dataclass(frozen=True)
class MemoryOfRank:
    """The peak memory of one rank, by purpose, in bytes."""

    rank: int
    peak: int
    limit: int | None = None
    """Bytes that the rank has, by its setting or its device. None if not known."""
    parts: dict[str, int] = field(default_factory=dict)
    """The peak by purpose: ``parameters``, ``buffers``, ``gradients``, ``optimizer``, ``activations``, ``buckets``,
    ``inputs``, ``other``."""
    growth: float | None = None
    """Bytes a step by which the memory in use grew in the second half of the run. None if not known."""


@dataclass(frozen=True)
class Collective:
    """All calls of one collective with one size."""

    name: str
    """``all_reduce``, ``broadcast`` and so on."""
    algorithm: str
    """Such as ``ring``; empty if not known."""
    nbytes: int
    """Bytes that a rank gives to one call."""
    calls_per_step: float
    seconds_per_step: float | None = None
    """Seconds of rank 0 from the start of these calls until the sum was there, with waiting for other ranks: the mean
    of the calls that were timed, times the calls of a step. None if not measured."""
    least_seconds: float | None = None
    """Seconds of the shortest call that was timed, which waited least. None if not measured."""


@dataclass(frozen=True)
class Span:
    """A part of a step on one rank."""

    rank: int
    name: str
    """``input``, ``forward``, ``backward``, ``compute``, ``waiting`` or ``communication``."""
    begin: float
    """Seconds since the begin of the step."""
    seconds: float


@dataclass(frozen=True)
class TimelineStep:
    """One step drawn over time. It shows durations: Evener records no clock of each part, so that the parts follow each
    other in their order."""

    step: int
    seconds: float
    why: str
    """Why it is shown: ``typical``, ``slowest`` or ``last``."""
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RunEvent:
    """Something that happened once."""

    step: int
    """Steps done before it."""
    kind: str
    """``note``, ``shares``, ``skipped``, ``memory``, ``restart``, or one of the faults ``death``, ``hang`` and
    ``error``."""
    words: str
    rank: int | None = None
    shares: tuple[float, ...] = ()
    """The new shares as fractions, by part of the batch, for ``shares``."""
    reason: str = ""
    """The balancer's reason, for ``shares``."""


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks."""

    step: int
    """Steps done before it."""
    world_size: int
    started: str | None = None
    """Time in UTC, as ISO 8601."""
    startup_seconds: float | None = None
    """From the start of the ranks' processes to their first step."""
    lost_steps: int = 0
    """Steps of earlier attempts that it repeats."""
    lost_seconds: float = 0.0
    """What those steps had taken."""
    reason: str = ""
    """Why the ranks were started again; empty for a first start, or if not known."""


@dataclass(frozen=True)
class PredictedTerm:
    """A part of a step as predicted and as measured, in seconds."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Prediction:
    """The step that ``evener plan`` predicted beside the median one of the run."""

    words: str
    low: float
    """Seconds: nine of ten steps were predicted to lie between ``low`` and ``high``."""
    high: float
    terms: tuple[PredictedTerm, ...]
    """The last one is the whole ``step``."""


@dataclass(frozen=True)
class Merges:
    """How replicas merged, for strategies in which ranks do not meet in each step."""

    words: tuple[str, ...]
    """Descriptions from the summary."""
    number: int
    """Merges in the records."""
    nbytes: int
    """Bytes of messages of rank 0."""
    wasted: int
    """Samples that were computed again."""
    versions_old: dict[str, int] = field(default_factory=dict)
    """Number of gradients by their age in versions: ``0``, ``1``, ``2-3``, ``4-7`` and so on."""
    spread: Series | None = None
    """Distance of the replicas from their mean at merges; see ``StepRecord.merge_spread``."""


@dataclass(frozen=True)
class Report:
    """One run."""

    identity: RunIdentity
    verdict: Verdict
    goodput: Goodput
    columns: Columns = Columns()
    series: tuple[Series, ...] = ()
    ranks: tuple[RankTotals, ...] = ()
    """All ranks in order; empty if no step has times by rank. At most `evener.tools.report.step_series.MOST_RANKS` of
    them have series of their own."""
    evaluations: tuple[EvaluationPoint, ...] = ()
    memory: tuple[MemoryOfRank, ...] = ()
    collectives: tuple[Collective, ...] = ()
    timeline: tuple[TimelineStep, ...] = ()
    events: tuple[RunEvent, ...] = ()
    """In order; if they are many, the first and last ones, with a note of how many were left out."""
    attempts: tuple[Attempt, ...] = ()
    prediction: Prediction | None = None
    merges: Merges | None = None
    samples_per_second: float = 0.0
    """Of all steps in the records but the first ones, which are slow."""
    every: int = 1
    """Times by rank are those of every ``every``-th step, and of the slowest step of each column; in a short run, of
    all steps."""
    steps_per_block: int = 0
    """Consecutive steps that make one entry of ``block_seconds``."""
    block_seconds: tuple[float, ...] = ()
    """Mean seconds of a step in consecutive blocks, without the first steps: what ``evener compare`` compares."""


@dataclass(frozen=True)
class ReportFile:
    """The content of ``report.json``."""

    runs: tuple[Report, ...]
    format: str = FORMAT
    version: int = VERSION
