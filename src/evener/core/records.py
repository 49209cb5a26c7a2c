"""Records of a run: one JSON object a line while it runs, and a summary at its end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from evener.core.html import summary_html
from evener.core.text import counted


@dataclass(frozen=True)
class RunStart:
    """Description of a run, known before its first step."""

    task: str
    settings: dict[str, Any]
    """The resolved settings, serializable as JSON."""
    world_size: int
    batch_size: int
    total_steps: int | None
    """None if the length of the data is not known."""
    steps_done: int
    """Steps taken before, if the run resumes; otherwise 0."""
    parts: tuple[int, ...] = ()
    """For each rank, the index of the part of every batch that it computes; if empty, each rank has its own part."""
    devices: tuple[str, ...] = ()
    """The device of each rank."""
    parameters: int = 0
    """Number of trained scalars in the whole model."""
    strategy: str = ""
    allreduce: str = ""
    """The all-reduce that sums the gradients; empty if it is not known yet."""
    run_dir: str | None = None
    shares: tuple[int, ...] = ()
    """Samples in each part of the first batch; empty if the data decide it, or if batches are not divided."""
    by_cost: bool = False
    """True if the shares are fractions of the cost of a batch, shown as for samples of equal cost."""
    learns: bool = False
    """True if the shares are later adapted to the speed of the ranks."""
    merging: str = ""
    """Description of how replicas merge; empty if all ranks meet in each step."""
    hosts: tuple[str, ...] = ()
    """The host of each rank."""
    threads: tuple[int, ...] = ()
    """For each rank, the threads of PyTorch in an operation."""
    cores: tuple[int, ...] = ()
    """For each rank, the cores that it may use together with the other ranks of its host."""
    memory_limits: tuple[int | None, ...] = ()
    """For each rank the bytes of memory that it may use: its limit, or the memory of its GPU. None for no limit;
    empty if no rank has one."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Evener, Python, torch and NumPy."""
    startup_seconds: float | None = None
    """Seconds from the start of rank 0, or since the ranks began to meet again, to the begin of training."""


@dataclass(frozen=True)
class Note:
    """A message for the user."""

    kind: ClassVar[str] = "note"
    step: int
    words: str


@dataclass(frozen=True)
class SkippedStep:
    """A step whose optimizer update was skipped."""

    kind: ClassVar[str] = "skipped"
    step: int
    words: str


@dataclass(frozen=True)
class MemoryRecord:
    """An event concerning a rank's memory, such as a new micro-batch size after an out-of-memory error."""

    kind: ClassVar[str] = "memory"
    step: int
    words: str


@dataclass(frozen=True)
class StepRecord:
    """One training step, over all ranks."""

    kind: ClassVar[str] = "step"
    step: int
    """Index of the step, from 0, in the whole training."""
    epoch: int
    """Index of the epoch, from 0."""
    loss: float
    """Loss over the whole batch, before the update."""
    samples: int
    """Samples of the batch, over all ranks."""
    seconds: float
    """Duration of the step, by the clock of rank 0."""
    shares: tuple[int, ...]
    """Samples of each part of the batch."""
    lr: float
    """Learning rate of the first parameter group."""
    costs: tuple[float, ...] = ()
    """The cost of the samples of each part, by ``Task.cost``; empty if the task gives none."""
    skipped: int = 0
    """Number of ``samples`` that could not be read. They contribute nothing to the loss."""
    compute_seconds: tuple[float, ...] = ()
    """Compute time of each rank, until its last gradient was ready."""
    wait_seconds: tuple[float, ...] = ()
    """Time that each rank waited for others until all gradients were summed."""
    input_seconds: tuple[float, ...] = ()
    """Time that each rank waited for samples, before the step."""
    forward_seconds: tuple[float, ...] = ()
    """Time of each rank's forward passes, a part of ``compute_seconds``; empty if the strategy does not tell them
    apart from backward passes."""
    memory_held: tuple[int, ...] = ()
    """Bytes in use on each rank: on a GPU by PyTorch's tensors; on a CPU by the process, or with a memory_limit by the
    tensors that count towards the limit."""
    memory_peak: tuple[int, ...] = ()
    """Maximum bytes in use on each rank since the previous step. On a CPU, memory is read at most 20 times a second:
    steps between two readings repeat the last one, and the peak is the maximum since the previous reading."""
    memory_reserved: tuple[int, ...] = ()
    """Bytes that PyTorch's allocator has reserved on each GPU; empty without GPUs."""
    memory_parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Each rank's ``memory_peak`` in bytes by category: ``parameters``, ``buffers``, ``gradients``, ``optimizer``,
    ``activations``, ``buckets``, ``inputs`` and ``other``. Categories that are 0 on all ranks are left out."""
    pieces: tuple[int, ...] = ()
    """The largest micro-batch that fits into each rank's memory, in samples; 0 if the whole share fits. Empty if the
    whole share fits on all ranks."""
    merge_spread: tuple[float, ...] = ()
    """For each merge of a round of local steps: the root mean square distance of the replicas from their mean, as a
    multiple of how far the mean has gone since the last merge. 0 means that all replicas have gone the same way."""
    merge_ranks: tuple[tuple[int, ...], ...] = ()
    """The ranks in each merge of a round of local steps with a quorum, but for the last merge, in which all are."""
    merge_bytes: int = 0
    """Bytes of differences that rank 0 has put into the merges of a round of local steps, after compression; or bytes
    of its messages with other ranks as a server of asynchronous training, in both directions."""
    merges: tuple[tuple[tuple[int, int, int, int], ...], ...] = ()
    """The merges of a section of asynchronous training in their order, each with the ranges that it holds in the order
    in which they were added: the rank, the number of merges of the section before the weights that it had, and the
    first position in the section and the one after the last."""
    wasted: int = 0
    """Samples of a section whose gradients were computed and did not merge; they were computed again."""
    graphs: tuple[int, ...] = ()
    """Graphs that each rank has compiled so far, and CUDA graphs that it has recorded or compared, if there are any. A
    step that does so is slow."""


@dataclass(frozen=True)
class SkippedRecord:
    """The samples of an epoch that were skipped because they could not be read."""

    kind: ClassVar[str] = "skipped"
    step: int
    epoch: int
    samples: list[dict[str, Any]]
    """For each sample the rank, the sample's number, and the reason."""

    @property
    def words(self) -> str:
        return f"epoch {self.epoch + 1}: {counted(len(self.samples), 'sample')} could not be read and were skipped"


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
    """Results of a run. ``seconds`` is the time of training only, without start-up and evaluation."""

    task: str
    """Name of the task."""
    strategy: str
    """Strategy that divided the work."""
    world_size: int
    """Number of ranks at the end."""
    devices: list[str]
    """Device of each rank."""
    steps: int
    """Training steps in all, including those before a resume."""
    epochs: int
    """Epochs in all, including those before a resume."""
    samples: int
    """Samples trained on in all, including those before a resume."""
    seconds: float
    """Time of training only, without start-up and evaluation."""
    samples_per_second: float
    """``samples_in_seconds / seconds``."""
    final_loss: float
    """Loss of the last step, over the whole batch."""
    metrics: dict[str, float]
    """Metrics of the last evaluation, including its loss; empty if there was none."""
    shares: list[float]
    """Fraction of all samples that each rank computed."""
    weights_digest: str
    """sha256 of all parameters and buffers: equal for bit-identical weights."""
    versions: dict[str, str]
    """Versions of Evener, Python, torch and NumPy."""
    batch_size: int
    """Global batch size, in samples."""
    seed: int
    """Seed of the initial weights and the order of samples."""
    ranks: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each rank: its compute time, that of its forward passes, its time of waiting for others and for input,
    and the CPU time of all its threads, with the time for which they had no core (``queued_seconds``)."""
    interrupted: bool = False
    """True if the run was stopped before its end."""
    run_dir: str | None = None
    """Directory of records, weights and checkpoints; None if nothing was saved."""
    emulation: str = ""
    """Description of the emulation of unequal devices; empty if there was none."""
    allreduce: str = ""
    """All-reduce that summed the gradients, or the differences of replicas."""
    merging: str = ""
    """Description of how replicas merged; empty if all ranks met in each step."""
    updates_of_server: str = ""
    """Description of the updates of asynchronous training: their number, and the age of their gradients in versions and
    in samples; else empty."""
    merge_bytes: int = 0
    """Bytes that rank 0 has sent for merges, in all steps of this run; see `StepRecord`."""
    late_for_merges: str = ""
    """Description of the merges with a quorum that did not wait for all ranks; empty if there were none."""
    precision: str = ""
    """Precision of the computation; empty if it was left as the task makes it."""
    memory: list[dict[str, int]] = field(default_factory=list)
    """Bytes on each rank: ``peak``, the maximum in use in a step, and its parts by category, as in the step records."""
    recompute: str = ""
    """Description of activation checkpointing; empty if none was used."""
    offload: str = ""
    """Description of offloading: what was offloaded, where to, and how much at most; empty if nothing was."""
    optimizer: str = ""
    """Description of the fused optimizer updates; empty if none were fused."""
    optimizer_state: str = ""
    """Description of the low-bit optimizer state; empty if it was not used."""
    exact: str = ""
    """Description of what the bits of the weights depend on, if they are the same on any division; else empty."""
    batch_norm: str = ""
    """Description of the BatchNorm statistics, if they were not taken over the samples of all ranks."""
    updates: str = ""
    """Description of the parameters that were updated in backward; empty if none were."""
    graphs: list[int] = field(default_factory=list)
    """Graphs that each rank has compiled in this run; empty if nothing was to be compiled."""
    cuda_graphs: str = ""
    """Description of the CUDA graphs of forward and backward, or of why there were none; empty if they were off."""
    uncompiled: list[str] = field(default_factory=list)
    """Modules that ran uncompiled because the compiled code gave different results."""
    graph_breaks: int = 0
    """Graph breaks, summed over all ranks: places at which code could not be compiled."""
    skipped_steps: int = 0
    """Steps whose optimizer update was skipped because a value was not finite."""
    skipped: int = 0
    """Samples of this run that could not be read. They contributed nothing to the loss."""
    workers: list[int] = field(default_factory=list)
    """Number of data loading processes of each rank."""
    samples_in_seconds: int = 0
    """Samples trained on since the start or the resume, which took ``seconds``."""
    cost: float = 0.0
    """Cost of ``samples_in_seconds`` by ``Task.cost``, such as a number of tokens; 0 if the task gives none."""
    cost_shares: list[float] = field(default_factory=list)
    """Fraction of ``cost`` that each rank computed; empty if the task gives none."""
    sample_seconds: list[float] = field(default_factory=list)
    """Compute time per sample on each rank, the median of the last steps; empty if there are too few steps, or if ranks
    share samples."""
    share_lines: list[list[float]] = field(default_factory=list)
    """For each rank the fixed seconds of its own work in a step, and those of each sample, as the last steps with
    different shares had them; empty if they differed too little to tell."""
    average: str = ""
    """Description of the average of the weights; empty if none was kept."""
    profile: str = ""
    """Description of the recorded profile, with its files; empty if none was asked for."""
    reading: str = ""
    """The rank that waited longest for its batches, and the cause; empty if no rank waited for long."""
    collectives: list[dict[str, Any]] = field(default_factory=list)
    """All-reduces of rank 0 in this run: ``name``, ``algorithm``, ``nbytes`` of one call, and ``calls``. If some calls
    were timed, on a CPU: ``timed``, their number; ``timed_seconds``, the sum of their times from the start until the
    sum was there, with waiting for other ranks and for earlier calls; ``least_seconds``, the shortest one."""
    link_seconds: list[float] = field(default_factory=list)
    """For each rank the seconds for a message to the next rank and back; empty if communication took too little of the
    time to be worth a measurement."""

    def __repr__(self) -> str:
        """Returns the result in one line; `as_json` returns all fields."""
        return f"<RunSummary of {self.words}>"

    def _repr_html_(self) -> str:
        return summary_html(self)

    @property
    def words(self) -> str:
        """The task, steps, ranks, time, loss and metrics in one line."""
        values = {"loss": self.final_loss} | self.metrics
        found = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        ranks = counted(self.world_size, "rank")
        broken_off = ", interrupted" if self.interrupted else ""
        return f"{self.task}: {counted(self.steps, 'step')} on {ranks} in {self.seconds:.1f} s{broken_off}, {found}"


def as_json(record: Any) -> dict[str, Any]:
    """Returns the fields of a record as a dict, with its kind first if it has one."""
    kind = getattr(record, "kind", None)
    # The fields of a step are plain values. `asdict` would copy them, and take ten times as long.
    fields = vars(record) if type(record) is StepRecord else dataclasses.asdict(record)
    return ({"kind": kind} if kind else {}) | fields


RECORDS = "records.jsonl"
"""Name of the record file in a run directory."""
