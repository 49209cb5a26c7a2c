"""Runs what is compared: the reference, the divided run, and the disturbed ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
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
from evener.tools.verify.comparison import Apart, Runs, Verification, compare, type_of
from evener.tools.verify.perturbation import Disturbance
from evener.tools.verify.trajectory import Trajectory, record
from evener.training.builtin_tasks import BUILT_IN
from evener.training.factory import balance_of, strategy_of
from evener.training.fit import check_plan

FIRST_RUNS = 3
"""Disturbed runs. Measured with one, the divided run lay up to 8 times the floor apart; with three, up to 5."""
ALL_RUNS = 12
"""Disturbed runs before the verdict is no."""
STRONGER = 8
"""By how much more the last of these are disturbed.

Where a ReLU stands within rounding of its kink, each run falls to one side or the other by chance, and the gradient
jumps by thousands of times the floor. A jump of the divided run has to be met on one device, which a stronger
disturbance is likelier to do. Types of half the precision need none: there, every run meets many."""

_HALF = 1e-4
"""Between the unit in the last place of ``float32`` and that of the types of half its width."""


def verify(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    **settings: Unpack[Settings],
) -> Verification:
    """Trains the same steps on one device and divided, and compares; rounding is measured and explains the rest.

    Args:
        task: As for :func:`evener.fit`; building it and loading its data must be deterministic.
        config: The division: processes, balance (the shares), strategy, steps, batch_size, micro_batch, and
            dtype or precision, in which both compute (default: float64).
        options: Keyword arguments for the task's function.
        tolerance: Largest ``max_relative_weight_error`` that passes, in place of what rounding explains.

    Raises:
        ConfigurationError: For settings that cannot work together.
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
    if is_launched():
        raise ConfigurationError(
            "verify starts ranks of its own: call it in one process, without torchrun or srun"
        )
    build = resolve(task, BUILT_IN, options)
    processes = check_plan(config)
    if processes < 2 and strategy_of(config, processes).label == "single":
        raise ConfigurationError("there is nothing to verify with 1 process: give at least --processes 2")
    built = build()
    _check_partition(built)
    config = config.replace(batch_size=config.batch_size or built.batch_size)
    eps = torch.finfo(type_of(config)).eps
    one = OneDevice(partial(record, task, options, alone(config), Environment()), eps)
    divided = launch(
        record,
        task,
        options,
        config,
        processes=processes,
        timeout_seconds=config.timeout_seconds,
        device=config.device,
    )

    def found() -> Verification:
        runs = Runs(one.reference, divided, one.disturbed, one.reordered, not is_torch_loss(built.loss))
        return compare(runs, config, built.name, tolerance)

    return judge(one, found)


def _in_numbers(config: RunConfig) -> RunConfig:
    """The settings with a type: what is given, what the device of ``precision=auto`` is best at, or float64; where the
    optimizer's update is in float32 whatever the weights are, that."""
    if config.precision == "auto":
        return config.replace(precision=able(torch.device(kind_taken(config.device)))[0])
    given = config.dtype or config.precision or config.precision_of
    return config if given else config.replace(dtype="float32" if config.optimizer_state else "float64")


def alone(config: RunConfig) -> RunConfig:
    """The same run on one device."""
    alike: dict[str, Any] = {"balance": "equal", "caps": None, "quantum": 1}
    alike |= {"throttle": None, "throttle_at": (), "compress": None, "allreduce": None}
    alike |= {"strategy_option": (), "mesh": None, "devices": None, "recompute": None}
    alike |= {"offload": None, "offload_to": None}
    alike |= {"update_in_backward": False, "batch_norm": "exact"}
    return config.replace(strategy="single", processes=1, **alike)


class OneDevice:
    """The reference, and the runs that rounding alone drives apart from it.

    These take the samples of a batch in another order, too, but not where the order matters to more than rounding, as
    to a layer that draws random numbers by the place of a sample: then rounding is not what would be measured.

    Args:
        run: Takes the steps, with the batches that ``run(batches=...)`` is given.
        eps: The unit in the last place, relative, of the type in which it computes.
    """

    def __init__(self, run: Callable[..., Trajectory], eps: float) -> None:
        self._run, self.eps = run, eps
        self.reference = run()
        self.disturbed: list[Apart] = []
        self.reordered = True
        self.measure(FIRST_RUNS)

    def measure(self, runs: int, strength: int = 1) -> None:
        """Takes further disturbed runs until there are so many."""
        while len(self.disturbed) < runs:
            seed = 1 + len(self.disturbed)
            other = self._run(batches=Disturbance(seed, self.reordered, strength, self.eps))
            if self.reordered and _more_than_rounding(self.reference, other, self.eps):
                self.reordered, self.disturbed = False, []
            else:
                self.disturbed.append(Apart.of(self.reference, other))


def judge(one: OneDevice, found: Callable[[], Verification]) -> Verification:
    """What ``found`` tells, of a floor that was measured more thoroughly before it says no."""
    first = found()
    settled = first.passed or not first.replicas_identical or len(first.losses) != len(first.reference_losses)
    if settled or first.tolerance is not None:
        return first
    one.measure(ALL_RUNS, STRONGER if one.eps < _HALF else 1)
    return found()


def _more_than_rounding(reference: Trajectory, other: Trajectory, eps: float) -> bool:
    """Whether the first loss, before any update, changed in half of its digits."""
    first, disturbed = reference.losses[0], other.losses[0]
    return abs(first - disturbed) > math.sqrt(eps) * abs(first)


def _check_partition(task: Task) -> None:
    if task.partition == "sample":
        raise ConfigurationError(
            "the task's data are partitioned by sample: who holds a sample decides which batch it is in, so that one "
            "device cannot take the same steps; verify the task with the same data in one place, partition='batch'"
        )
