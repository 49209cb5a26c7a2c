"""Chooses how a run trains by a calibration that was saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.core.config.run_config import RunConfig
from evener.core.task.task import TaskLike, resolve
from evener.distributed.environment import detect
from evener.errors import ConfigurationError, EvenerError
from evener.tools.plan.calibration import Calibration, this_machine
from evener.tools.plan.plan import ways_of
from evener.tools.plan.result import Way
from evener.tools.plan.structure import is_other_model
from evener.training.builtin_tasks import BUILT_IN
from evener.training.factory import check_division


def chosen_way(
    path: Path, config: RunConfig, task: TaskLike, options: Mapping[str, Any] | None = None
) -> tuple[RunConfig, Way]:
    """Returns the settings of a run in the fastest way of a calibration, and that way.

    Ways count that have taken steps with at least as many samples, so that they do not run out of memory. With ranks
    that another launcher has started, ways of their number count.

    Args:
        task: What is trained.
        options: Keyword arguments of the task's function.

    Raises:
        ConfigurationError: If the plan is of another task, model, machine or settings, if the settings say already how
            to train, or if no way counts.
        DataError: If the file is no calibration.
    """
    if config.strategy != "auto" or config.mesh or config.strategy_option:
        raise ConfigurationError(
            "a plan chooses the strategy: leave out strategy, strategy_option and mesh, or the plan"
        )
    if config.memory_limit or config.memory_limit_at:
        raise ConfigurationError(
            "a plan was tried without memory limits, so it may choose what does not fit: give the strategy yourself"
        )
    calibration = Calibration.read(path)
    if calibration.machine != this_machine():
        raise ConfigurationError(
            f"{path} was made on another machine ({calibration.machine}; this is {this_machine()}): make one here with "
            "evener plan TASK --save"
        )
    built = resolve(task, BUILT_IN, options)()
    calibration.check(built.name, config)
    if calibration.structure and is_other_model(calibration.structure, built):
        raise ConfigurationError(
            f"{path} is of the task {built.name!r} with another model, loss or optimizer, which may need more time and "
            "memory: make a plan for this"
        )
    return settings_by_plan(path, calibration, config, config.batch_size or calibration.batch_size)


def settings_by_plan(
    path: Path, calibration: Calibration, config: RunConfig, batch_size: int, ranks: int | None = None
) -> tuple[RunConfig, Way]:
    """Returns the settings of a run in the fastest way that has taken steps with so many samples, and that way.

    Ways that do not go with the other settings are passed over. If none goes with them, the first is returned, so that
    the run says why.

    Args:
        path: The file of the calibration, for messages.
        ranks: The number of ranks. None for any that the settings allow.

    Raises:
        ConfigurationError: If no way counts.
    """
    world_size = detect().world_size
    ways = [
        way
        for way in ways_of(calibration, config, batch_size)
        if max(way.costs.sizes, default=0) >= batch_size
        and world_size in (1, way.candidate.ranks)
        and ranks in (None, way.candidate.ranks)
    ]
    if not ways:
        tried = max((size for costs in calibration.costs.values() for size in costs.sizes), default=0)
        where = f" on {world_size} ranks" if world_size > 1 else ""
        raise ConfigurationError(
            f"{path} has no way that was tried with batches of {batch_size}{where} and these settings, and none with "
            f"more than {tried}: make a plan for this batch size"
        )
    asked = [(_as_chosen(config, way), way) for way in ways]
    return next((each for each in asked if _can_work(each[0], each[1].candidate.ranks)), asked[0])


def _as_chosen(config: RunConfig, way: Way) -> RunConfig:
    chosen = way.candidate
    return config.replace(
        strategy=chosen.strategy,
        strategy_option=chosen.options,
        mesh=chosen.mesh,
        allreduce=chosen.allreduce or config.allreduce,
        processes=chosen.ranks,
    )


def _can_work(config: RunConfig, ranks: int) -> bool:
    """Returns True unless a setting that trials leave out, such as learned shares, does not go with the strategy."""
    try:
        check_division(config, ranks)
    except EvenerError:
        return False
    return True
