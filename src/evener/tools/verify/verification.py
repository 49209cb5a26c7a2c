"""Runs the reference, the divided run and the disturbed runs, and compares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch

from evener.components.amp.policy import able
from evener.core.config.kwargs import Settings
from evener.core.config.run_config import RunConfig
from evener.core.losses.torch_losses import is_torch_loss
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import Environment, kind_taken
from evener.distributed.launch.launch import is_launched, launch
from evener.errors import ConfigurationError
from evener.tools.verify.comparison import ComparedRuns, RunDistance, Verification, compare, type_of
from evener.tools.verify.perturbation import Disturbance
from evener.tools.verify.progress import VerificationProgress
from evener.tools.verify.trajectory import Batches, Trajectory, record
from evener.training.builtin_tasks import BUILT_IN
from evener.training.engine import Engine
from evener.training.factory import balance_of, strategies_named, strategy_of
from evener.training.fit import check_plan
from evener.training.reporting.notebook import drawn_progress

FIRST_RUNS = 3
"""Disturbed runs at first. With one, the divided run measured up to 8 times the floor; with three, up to 5 times."""
ALL_RUNS = 12
"""Disturbed runs before a verification fails."""
STRONGER = 8
"""Factor by which the runs after the first :data:`FIRST_RUNS` are disturbed more strongly.

If the input of a ReLU lies within rounding of its kink, each run falls on one side or the other by chance, and the
gradient jumps by thousands of times the floor. Such a jump of the divided run must also occur on one device, and a
stronger disturbance makes it more likely. Half-precision dtypes do not need this: every run has many such jumps.
"""

_HALF = 1e-4
"""Separates the eps of ``float32`` from the larger eps of half-precision dtypes."""


def verify(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    **settings: Unpack[Settings],
) -> Verification:
    """Trains the same steps on one device and divided over ranks, and compares the runs. Differences up to the measured
    effect of rounding pass.

    Args:
        task: As for :func:`evener.fit`. Building it and loading its data must be deterministic.
        config: Settings of the divided run: processes, balance, strategy, steps (default: 20), batch_size, micro_batch,
            and the dtype or precision of both runs (default: float64).
        options: Keyword arguments of the task's function.
        tolerance: Largest ``max_relative_weight_error`` that passes, instead of a multiple of the measured rounding.

    Raises:
        ConfigurationError: If the settings cannot work together.
    """
    config = (config or RunConfig()).replace(**settings)
    usual = {"steps": config.steps or 20, "check_replicas": 0, "balance": balance_of(config, 1, unlike=False)}
    config = _in_numbers(config).replace(**usual)
    if tolerance is not None and not tolerance >= 0:
        raise ConfigurationError(f"tolerance is {tolerance}; it must be a number of at least 0")
    if config.resume is not None:
        raise ConfigurationError(
            f"verify takes its steps from the first weights on, and not from {config.resume}: leave resume out"
        )
    check_alone()
    build = resolve(task, BUILT_IN, options)
    processes = check_plan(config)
    if processes < 2 and strategy_of(config, processes).label == "single":
        raise ConfigurationError("there is nothing to verify with 1 process: give at least --processes 2")
    built = build()
    _check_partition(built)
    config = config.replace(batch_size=config.batch_size or built.batch_size)
    eps, on_one = torch.finfo(type_of(config)).eps, alone(config, processes)

    def run(batches: Batches = Engine.batches) -> Trajectory:
        return record(task, options, on_one, Environment(), batches, progress.next_run("on one device"))

    def found() -> Verification:
        runs = ComparedRuns(
            one.reference, divided, one.disturbed, one.reordered, not is_torch_loss(built.loss)
        )
        return compare(runs, config, built.name, tolerance)

    with drawn_progress() as file:
        progress = VerificationProgress(file, FIRST_RUNS + 2, config.steps or 0)
        one = OneDevice(run, eps)
        divided = launch(
            record,
            task,
            options,
            config,
            None,
            Engine.batches,
            progress.next_run(f"on {processes} ranks"),
            processes=processes,
            timeout_seconds=config.timeout_seconds,
            device=config.device,
        )
        return judge(one, found)


def _in_numbers(config: RunConfig) -> RunConfig:
    """Returns the settings with a dtype or precision: the given one, or the best one of the device for
    ``precision=auto``. The default is float64, or float32 if the optimizer updates in float32 whatever the weights'
    dtype.
    """
    if config.precision == "auto":
        return config.replace(precision=able(torch.device(kind_taken(config.device)))[0])
    given = config.dtype or config.precision or config.precision_of
    return config if given else config.replace(dtype="float32" if config.optimizer_state else "float64")


def alone(config: RunConfig, processes: int = 1) -> RunConfig:
    """Returns the settings of the same run on one device.

    Raises:
        ConfigurationError: If the run would not be the same from one time to the next.
    """
    found = (part.on_one_device(processes) for part in strategies_named(config))
    strategy = next((each for each in found if each is not None), None)
    alike: dict[str, Any] = {"balance": "equal", "max_shares": None, "share_multiple_of": 1}
    alike |= {"throttle": None, "throttle_at": (), "compress": None, "allreduce": None}
    alike |= {"strategy_option": (), "mesh": None, "devices": None, "recompute": None}
    alike |= {"offload": None, "offload_to": None}
    alike |= {"update_in_backward": False}
    alike |= {"batch_norm": "exact"} if config.batch_norm == "local" else {}
    if strategy is not None:
        alike["balance"] = config.balance
        if config.balance == "auto":
            raise ConfigurationError(
                f"with strategy {strategy.label!r} shares decide which replica trains on what, and those of balance "
                "auto are other ones each time: verify it with fixed shares, as in --shares 3,1"
            )
    return config.replace(strategy=strategy or "single", processes=1, **alike)


class OneDevice:
    """The reference and the disturbed runs on one device.

    The disturbed runs also change the order of the samples in a batch, unless the order matters by more than rounding.
    It does, for example, if a layer draws random numbers by the position of a sample.

    Args:
        run: Takes the steps, with the batches that ``run(batches=...)`` is given.
        eps: Relative unit in the last place of the dtype in which it computes.
    """

    def __init__(self, run: Callable[..., Trajectory], eps: float) -> None:
        self._run, self.eps = run, eps
        self.reference = run()
        self.disturbed: list[RunDistance] = []
        self.reordered = True
        self.measure(FIRST_RUNS)

    def measure(self, runs: int, strength: int = 1) -> None:
        """Adds disturbed runs until there are ``runs`` of them."""
        while len(self.disturbed) < runs:
            seed = 1 + len(self.disturbed)
            other = self._run(batches=Disturbance(seed, self.reordered, strength, self.eps))
            if self.reordered and _more_than_rounding(self.reference, other, self.eps):
                self.reordered, self.disturbed = False, []
            else:
                self.disturbed.append(RunDistance.from_runs(self.reference, other))


def judge(one: OneDevice, found: Callable[[], Verification]) -> Verification:
    """Returns the result of ``found``. Measures the floor with more runs first, if a larger floor might let it pass."""
    first = found()
    settled = first.passed or not first.replicas_identical or len(first.losses) != len(first.reference_losses)
    if settled or first.tolerance is not None:
        return first
    one.measure(ALL_RUNS, STRONGER if one.eps < _HALF else 1)
    return found()


def _more_than_rounding(reference: Trajectory, other: Trajectory, eps: float) -> bool:
    """Returns True if the first loss, before any update, changed in more than the last half of its digits."""
    first, disturbed = reference.losses[0], other.losses[0]
    return abs(first - disturbed) > math.sqrt(eps) * abs(first)


def _check_partition(task: Task) -> None:
    if task.partition == "sample":
        raise ConfigurationError(
            "the task's data are partitioned by sample: who holds a sample decides which batch it is in, so that one "
            "device cannot take the same steps; verify the task with the same data in one place, partition='batch'"
        )


def check_alone() -> None:
    """Raises ConfigurationError in a rank that a launcher has started."""
    if is_launched():
        raise ConfigurationError(
            "verify starts ranks of its own: call it in one process, without torchrun or srun"
        )
