"""The settings of a run: one frozen, validated data class.

Each field holds its help text. The command line is made from this class, so every setting has one name, one default and
one explanation everywhere. Nothing here imports torch, which keeps ``evener --help`` fast.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.core.config import choices
from evener.core.config.exact_bits import check_exact_bits
from evener.core.config.intervals import Interval
from evener.core.config.kinds import fit_kinds
from evener.core.config.offload import Offload
from evener.core.config.option import as_json, option
from evener.core.config.process_range import processes_of
from evener.core.config.strategy_names import STRATEGIES
from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.core.config.validation import (
    as_path,
    at_least,
    check_best,
    check_compile,
    check_device,
    check_lean,
    check_metrics_file,
    check_non_finite,
    check_offload,
    check_on_replica_mismatch,
    check_precision,
    check_recompute,
    check_settings,
    check_update_in_backward,
    number_or_auto,
    one_of,
    positive,
    positive_seconds,
)
from evener.errors import ConfigurationError

AUTO = "auto"
"""The value of ``resume`` that resumes from ``run_dir`` itself, if it holds a checkpoint."""


class Recipe:
    """The base of :class:`evener.strategies.Strategy`, which ``strategy=`` accepts besides a name."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run. ``None`` means the default of the task or of the machine."""

    batch_size: int | None = option(None, "samples in a global batch, over all ranks", metavar="N")
    epochs: int | None = option(None, "passes over the training data", metavar="N")
    steps: int | None = option(None, "stop after this many steps, whatever the epochs", metavar="N")
    micro_batch: str | int | None = option(
        None,
        "cut each global batch into micro-batches of at most N samples over all ranks; auto: each rank as its memory "
        "has room for",
        metavar="N",
    )
    memory_limit: str | None = option(
        None,
        "most memory that each rank may use of its device: one size, such as 24GB, or one for each; - for all",
        metavar="SIZE,...",
    )
    memory_limit_at: tuple[str, ...] = option(
        (), "from STEP on, RANK may use SIZE; may be repeated", metavar="STEP:RANK:SIZE"
    )
    exact: str = option(
        "sums",
        "sums: the training of one device, to rounding; bits: the same weights to the last bit on any number of "
        "devices of one kind, with any shares",
        choices=choices.EXACT,
    )
    grain: int | None = option(
        None, "exact bits: samples computed together (default: 16 or fewer)", metavar="N"
    )
    block: int | None = option(None, "exact bits: grains in a block, the unit of shares", metavar="N")
    audit: float = option(
        0.0, "exact bits: part of all blocks that a second rank computes as well, such as 0.01", metavar="X"
    )
    seed: int = option(0, "seed of the weights, the order of samples and dropout", metavar="N")
    strategy: str | Recipe | tuple[Recipe, ...] = option(
        "auto",
        f"how a step runs over the ranks: auto, {', '.join(STRATEGIES)}, or package.module:Class; several with commas, "
        "over a mesh",
        metavar="NAME",
    )
    strategy_option: tuple[str, ...] = option(
        (), "an option of the strategy, such as schedule=gpipe; may be repeated", metavar="KEY=VALUE"
    )
    mesh: str | None = option(
        None,
        "ranks along the axes pipeline, data, shard, context and tensor, such as data=2,tensor=2 (default: all on the "
        "strategy's own axis)",
        metavar="AXIS=N,...",
    )
    devices: str | None = option(
        None,
        "devices of one process, such as cuda:0,cuda:1 or cpu:0,cpu:1, for strategies that use several in one",
        metavar="D0,D1,...",
    )
    processes: str | int | None = option(
        None,
        "ranks on this machine (default: one per GPU, or one per core up to 4), or MIN:MAX: the run may "
        "go on with fewer after a death, and with fewer or more when it is asked to (evener resize)",
        metavar="N",
    )
    device: str | None = option(
        None,
        "kind of device: cpu, cuda, or another that torch has; mixed: each host its own (default: cuda where there is "
        "one)",
    )
    balance: str | None = option(
        None,
        "how a batch is divided: equal, auto (by learned speed), fixed weights W0,W1,..., or package.module:Class "
        "(default: auto where the ranks' devices are not alike, else equal)",
        metavar="HOW",
    )
    max_shares: str | None = option(
        None, "most samples of each rank in a batch, such as 64,- (- for no limit)", metavar="N0,N1,..."
    )
    share_multiple_of: int = option(1, "round shares to multiples of N; one rank takes the rest", metavar="N")
    throttle: str | None = option(
        None,
        "EMULATE unequal devices: each rank sleeps until it is as slow as this fraction of its speed, such as 1,0.5",
        metavar="F0,F1,...",
    )
    throttle_at: tuple[str, ...] = option(
        (),
        "EMULATE a change: from STEP on, RANK runs at FACTOR of its speed; may be repeated",
        metavar="STEP:RANK:FACTOR",
    )
    clip_norm: float | None = option(None, "clip gradients to this global norm", metavar="X")
    allreduce: str | None = option(
        None,
        "how gradients are summed: native, ring, ..., auto, or package.module:make (default: shared memory on CPUs)",
        metavar="NAME",
    )
    non_finite: str = option(
        "stop",
        "if a loss or a gradient of a step is NaN or infinite: stop the run, skip the update on all ranks, or restore "
        "the last checkpoint",
        choices=("stop", "skip", "restore"),
    )
    check_replicas: int | None = option(
        None,
        "compare what ranks must hold alike every N steps and at the end; 0: never (default: as often as costs 0.5 %)",
        metavar="N",
    )
    on_replica_mismatch: str | None = option(
        None,
        "where replicas differ, give them the state of the majority or of rank 0 (default: stop)",
        choices=("majority", "rank0"),
    )
    compress: str | None = option(
        None,
        "send gradients in fewer bits: fp16, bf16, int8, fp8, top-k, powersgd; between hosts alone with -between "
        "(int8-between); not exact",
        metavar="NAME",
    )
    bucket_mb: float | None = option(
        None,
        "size of the buckets in which gradients are sent, in MiB (default: 25, or with --allreduce auto as measured)",
        metavar="X",
    )
    workers: int = option(0, "processes that load data, for each rank; 0: the rank reads itself", metavar="N")
    dtype: str | None = option(
        None, "type of weights and floating inputs (default: as the task makes them)", choices=choices.DTYPES
    )
    precision: str | None = option(
        None,
        "precision in which the model computes: fp32, tf32, bf16 or fp16 (autocast, weights of float32), "
        "bf16-true or fp16-true (all of it), auto by the devices (default: as the task makes it)",
        metavar="NAME",
    )
    precision_of: tuple[str, ...] = option(
        (),
        "modules whose names fit PATTERN, such as head or blocks.*.norm, compute in fp32, bf16 or fp16; may be "
        "repeated",
        metavar="PATTERN=NAME",
    )
    compile: str | None = option(
        None,
        "use torch.compile: repeated blocks, the whole model, or auto (if no value is given): blocks if there are any",
        choices=choices.COMPILE,
        without_value="auto",
    )
    compile_mode: str | None = option(
        None, "torch.compile's mode, such as reduce-overhead for CUDA graphs", metavar="MODE"
    )
    compile_backend: str = option(
        choices.BACKEND,
        "torch.compile's backend, such as aot_eager to find what cannot be compiled",
        metavar="NAME",
    )
    compile_check: str = option(
        "replace",
        "compiled code is compared with the model: replace computes uncompiled what differs, stop ends the run, no "
        "compares nothing",
        choices=choices.COMPILE_CHECK,
    )
    batch_norm: str = option(
        "exact",
        "statistics of BatchNorm: exact: over the samples of all ranks, as on one device; local: over each rank's own, "
        "another training for every division; grain: over each grain's (exact=bits)",
        choices=choices.BATCH_NORMS,
    )
    recompute: str | None = option(
        None,
        "activation checkpointing: compute repeated blocks of the model again in backward. blocks: all of them; a "
        "budget: as few as 60% of the peak, 8GB, or 8GB,4GB by rank, allow",
        metavar="HOW",
    )
    offload: str | None = option(
        None,
        "move to host memory until needed: optimizer (state), activations (saved for backward), or both with a comma",
        metavar="WHAT",
    )
    offload_to: Path | None = option(
        None,
        "where --offload moves it: files in DIR (default: the host's memory, for ranks on a GPU)",
        metavar="DIR",
    )
    optimizer_state: str | None = option(
        None,
        "keep the state of the task's Adam or AdamW in 8 bits, by torchao: less memory, slightly different results",
        choices=choices.OPTIMIZER_STATES,
    )
    fused_optimizer: str = option(
        "auto",
        "auto: use PyTorch's fused kernel for the task's Adam or AdamW, where there is one and the task says "
        "nothing else; no: as PyTorch chooses by itself",
        choices=choices.FUSED_OPTIMIZER,
    )
    lean: bool = option(
        False, "watch no gradients and no memory: what is not finite is found by the loss, a step later"
    )
    cuda_graphs: str = option(
        "off",
        "auto: replay forward and backward of batches of known shapes as CUDA graphs, with single and ddp, where the "
        "model permits it; on a GPU tried with single alone",
        choices=choices.CUDA_GRAPHS,
    )
    update_in_backward: bool = option(
        False,
        "update each parameter as soon as backward has its gradient, and free the gradient (less memory; the "
        "optimizer's step fused into backward)",
    )
    evaluate_every: int = option(
        1, "evaluate after every N epochs and at the end; 0: only at the end", metavar="N"
    )
    timeout_seconds: float = option(
        TIMEOUT_SECONDS, "longest wait for other ranks before the run is ended", metavar="S"
    )
    run_dir: Path | None = option(
        None,
        "directory that the run leaves, or a URL such as s3://bucket/run (default: runs/TASK-TIME)",
        metavar="DIR",
    )
    resume: Path | None = option(
        None,
        "continue from the checkpoint of this run directory or URL; auto: of --run-dir, if it has one",
        metavar="DIR",
    )
    override: tuple[str, ...] = option(
        (),
        "where the checkpoint has another, use the task's NAME: an option of the optimizer such as lr, or scheduler",
        metavar="NAME",
    )
    save_every: str | int = option(
        "1epoch", "interval between checkpoints: 500 (steps), 10min, 1epoch", metavar="INTERVAL"
    )
    keep: int = option(2, "keep the last N checkpoints; older ones are removed", metavar="N")
    keep_best: str | None = option(
        None,
        "also keep the checkpoint with the best METRIC of all evaluations: the lowest of a loss, the highest of any "
        "other, or as METRIC:min and METRIC:max say",
        metavar="METRIC",
    )
    save_mode: str = option(
        "async",
        "async: training goes on while a checkpoint is written, from a copy on the CPU; blocking: it waits",
        choices=("async", "blocking"),
    )
    recover: str = option(
        "memory",
        "after a rank has died, with --max-restarts: memory: that one is replaced and gets the state from another, "
        "where each rank holds all of it; file: all start again from the last checkpoint",
        choices=("memory", "file"),
    )
    check_data: str | None = option(
        None,
        "before the first step read some samples twice on every rank and compare: exact, or augmented, by which they "
        "may draw from the generators of torch, NumPy and random",
        choices=choices.CHECK_DATA,
    )
    on_bad_sample: str = option(
        "stop", "what to do with a sample that cannot be read: stop, or skip it", choices=choices.BAD_SAMPLE
    )
    on_full_disk: str = option(
        "stop",
        "where a checkpoint or the records cannot be written: stop, or go-on without; the last checkpoint of a run "
        "must be written in any case",
        choices=choices.FULL_DISK,
    )
    grace_seconds: float = option(
        20.0,
        "longest time in which a run that is asked to stop (SIGTERM, Ctrl-C) may save and end",
        metavar="S",
    )
    notice_command: str | None = option(
        None,
        "a shell command that each launcher runs every 5 s; status 0: this host goes away soon, as SIGTERM tells",
        metavar="CMD",
    )
    profile: int | None = option(
        None,
        "record N steps after the first three with torch.profiler: one trace for each rank, in the run directory",
        metavar="N",
    )
    metrics_file: Path | None = option(
        None,
        "write live figures every few seconds to this text file, as Prometheus's node_exporter reads it (*.prom)",
        metavar="FILE",
    )
    overwrite: bool = option(False, "replace a finished run in the run directory")
    weights: Path | None = option(
        None, "start with these weights: safetensors of evener export, or a state_dict", metavar="FILE"
    )

    def __new__(cls, *_: Any, **settings: Any) -> RunConfig:
        check_settings(settings, [entry.name for entry in dataclasses.fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        fit_kinds(self)
        for name in ("run_dir", "resume", "weights", "offload_to", "metrics_file"):
            object.__setattr__(self, name, as_path(name, getattr(self, name)))
        if isinstance(self.processes, str):
            object.__setattr__(self, "processes", processes_of(self.processes))
        if not isinstance(self.processes, str):
            at_least("processes", self.processes, 1)
        micro_batch = number_or_auto("micro_batch", self.micro_batch, "samples", 1)
        object.__setattr__(self, "micro_batch", micro_batch)
        for name in ("batch_size", "epochs", "steps", "share_multiple_of", "keep", "profile"):
            at_least(name, getattr(self, name), 1)
        for name in ("evaluate_every", "seed", "check_replicas", "workers"):
            at_least(name, getattr(self, name), 0)
        for name in ("clip_norm", "bucket_mb"):
            positive(name, getattr(self, name))
        for name in ("timeout_seconds", "grace_seconds"):
            positive_seconds(name, getattr(self, name))
        Interval.parse(self.save_every)
        check_best(self.keep_best)
        check_metrics_file(self.metrics_file)
        if str(self.resume) == AUTO and self.run_dir is None:
            raise ConfigurationError("resume is auto: name the directory of the run too (run_dir, --run-dir)")
        for entry in dataclasses.fields(self):
            if known := entry.metadata.get("choices"):
                one_of(entry.name, getattr(self, entry.name), known)
        check_exact_bits(self)
        one_of("precision", self.precision, choices.PRECISIONS)
        check_precision(self.dtype, self.precision, self.precision_of, self.compress)
        check_compile(self.compile, self.compile_mode, self.compile_backend, choices.BACKEND)
        check_recompute(self.recompute, self.compile)
        offload = Offload.from_settings(self.offload, self.offload_to)
        check_offload(offload, self.recompute, self.compile_mode)
        if self.update_in_backward:
            limit = self.memory_limit or (", ".join(self.memory_limit_at) or None)
            check_update_in_backward(self.clip_norm, self.non_finite, self.micro_batch, limit, offload)
        check_device(self.device)
        check_on_replica_mismatch(self.on_replica_mismatch, self.check_replicas)
        check_non_finite(self.non_finite, self.compress)
        check_lean(self.lean, self.non_finite, self.precision, self.exact)
        if self.weights is not None and self.resume is not None and str(self.resume) != AUTO:
            raise ConfigurationError("weights and resume exclude each other: a checkpoint has weights")

    def replace(self, **changes: Any) -> RunConfig:
        """Returns a copy with some values changed.

        Raises:
            ConfigurationError: If a value is invalid, or a name is not a setting.
        """
        return dataclasses.replace(self, **changes)

    @property
    def samples_at_once(self) -> int | None:
        """The samples of a micro-batch over all ranks; None if ``micro_batch`` is ``auto`` or not set."""
        return self.micro_batch if isinstance(self.micro_batch, int) else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name, in types that JSON can hold."""
        found = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {name: as_json(value) for name, value in found.items()}
