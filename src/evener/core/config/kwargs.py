"""The settings as keyword arguments: what an editor completes in a call of ``fit``, and mypy checks there.

Written from the fields of ``RunConfig`` by ``python -m tests.writing_settings``; a test compares both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from evener.core.config.run_config import Recipe


class LoopSettings(TypedDict, total=False):
    """Settings that go with a loop of one's own, for ``evener.prepare``."""

    strategy: str | Recipe | tuple[Recipe, ...]
    strategy_option: tuple[str, ...]
    mesh: str | None
    precision: str | None
    precision_of: tuple[str, ...]
    compile: str | None
    compile_mode: str | None
    compile_backend: str
    compile_check: str
    recompute: str | None
    allreduce: str | None
    balance: str | None
    batch_norm: str
    bucket_mb: float | None
    max_shares: str | None
    check_data: str | None
    compress: str | None
    device: str | None
    share_multiple_of: int
    seed: int
    throttle: str | None
    throttle_at: tuple[str, ...]
    timeout_seconds: float


class Settings(LoopSettings, total=False):
    """Settings of a run; ``evener train --help-full`` explains each."""

    batch_size: int | None
    epochs: int | None
    steps: int | None
    micro_batch: str | int | None
    memory_limit: str | None
    memory_limit_at: tuple[str, ...]
    exact: str
    grain: int | None
    block: int | None
    audit: float
    devices: str | None
    processes: str | int | None
    clip_norm: float | None
    non_finite: str
    check_replicas: int | None
    on_replica_mismatch: str | None
    workers: int
    dtype: str | None
    offload: str | None
    offload_to: str | Path | None
    optimizer_state: str | None
    fused_optimizer: str
    lean: bool
    cuda_graphs: str
    update_in_backward: bool
    evaluate_every: int
    run_dir: str | Path | None
    resume: str | Path | None
    override: tuple[str, ...]
    save_every: str | int
    keep: int
    keep_best: str | None
    save_mode: str
    recover: str
    on_bad_sample: str
    on_full_disk: str
    grace_seconds: float
    notice_command: str | None
    profile: int | None
    metrics_file: str | Path | None
    overwrite: bool
    weights: str | Path | None
