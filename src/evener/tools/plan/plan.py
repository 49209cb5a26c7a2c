"""Makes plans: tries on this machine what can be tried, predicts the rest, and sorts it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch

from evener.balance.registry import fixed_weights
from evener.balance.shares import parse_max_shares
from evener.balance.throttle import Throttle
from evener.core.config.exact_bits import ExactBits
from evener.core.config.kwargs import Settings
from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import parse_limits
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import default_processes, kind_taken, usable_cores
from evener.errors import ConfigurationError, EvenerError, ShareError
from evener.hardware import accelerators
from evener.tools.estimate import estimate_memory
from evener.tools.plan.calibration import Calibration, counted_settings, this_machine
from evener.tools.plan.candidates import (
    LOCAL_STEPS,
    NEVER_TRIED,
    SPECIAL,
    Candidate,
    numbers_of_ranks,
    strategy_named,
)
from evener.tools.plan.costs import StepCosts, StepTime, step_time
from evener.tools.plan.local_steps_way import fastest_by_local_steps
from evener.tools.plan.measured import UNREPEATED_SPREAD, costs_of, spread_of
from evener.tools.plan.result import TrainingPlan, Way, best_all_reduce
from evener.tools.plan.rounds import START_SECONDS, Round, rounds_of, seconds_of_first
from evener.tools.plan.structure import structure_of
from evener.tools.plan.sum_trials import SumTimes, with_all_reduces
from evener.tools.plan.trial import Trial
from evener.tools.plan.trials import Refusal, run_trials
from evener.tools.plan.work import knowable
from evener.training.builtin_tasks import BUILT_IN

SECONDS = 40.0
"""About how long all trials take together."""
SETUP_SECONDS = 0.15
"""About how long it takes to set up a trial of a small model."""
TRIAL_SECONDS = 0.05, 1.0
"""The least and the most that the steps of a trial take."""
BUSY = 0.5
"""A machine is busy if more programs than this part of its cores want to compute."""
COST_IGNORED = "Task.cost is not considered: a rank's time is predicted by its number of samples"
COST_OF_GRAINS = (
    "A rank with one or two grains loses nothing; one with many grains of a small fully connected network takes 2 to 4 "
    "times as long as with whole batches"
)
ESTIMATED = 5
"""So many of the fastest ways get an estimate of their memory."""


def make_plan(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    seconds: float = SECONDS,
    calibration: Calibration | None = None,
    **settings: Unpack[Settings],
) -> TrainingPlan:
    """Predicts the time of a step for each way to train a task on the devices of this machine.

    A few steps are taken in each way, with up to ``processes`` ranks, with the batch and with a smaller and a
    larger one. Times for other batches, shares and speeds follow from these.

    Args:
        task: As :func:`evener.fit` takes it.
        config: The settings. ``settings`` override single ones.
        options: Keyword arguments of the task's function.
        seconds: About how long the trials may take.
        calibration: What earlier trials have found; then none are made.

    Raises:
        ConfigurationError: If the settings cannot work together, or the task cannot be trained in any way.
    """
    began, config = time.monotonic(), (config or RunConfig()).replace(**settings)
    built = resolve(task, BUILT_IN, options)()
    batch_size = config.batch_size or built.batch_size
    if calibration is None:
        calibration = calibrate(task, config, options=options, seconds=seconds)
    calibration.check(built.name, config)
    if with_grains(config, batch_size) != with_grains(config, calibration.batch_size):
        raise ConfigurationError(
            f"the trials were of batches of {calibration.batch_size}, whose grains are not those of batches of "
            f"{batch_size}: plan without them, or make them with grain and block"
        )
    config = with_grains(config, batch_size)
    batch_size, notes_of_size = whole_batch(built, batch_size)
    refused = dict(calibration.refused)
    ways = ways_of(calibration, config, batch_size, refused)
    if not ways:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigurationError(f"{built.name} can be trained in no way that was tried: {reasons}")
    timed = partial(predicted, config=config, batch_size=batch_size)
    is_free = strategy_named(config) == "auto" and not config.memory_limit and config.exact != "bits"
    by_merges = fastest_by_local_steps(ways, config, timed) if is_free else None
    ways, notes = _with_memory(task, ways, config, batch_size, options)
    ways += [] if by_merges is None else [by_merges]
    notes += notes_of_size
    if calibration.load > BUSY * usable_cores():
        notes.append(
            f"{calibration.load:.1f} programs wanted to compute on {usable_cores()} cores when the trials began: times "
            "are those of a busy machine, and uncertain"
        )
    if built.cost is not None:
        notes.append(COST_IGNORED)
    if config.exact == "bits":
        notes.append(
            f"exact=bits: {ExactBits.chosen(batch_size, config.grain, config.block).words}. {COST_OF_GRAINS}"
        )
    return TrainingPlan(
        task=built.name,
        batch_size=batch_size,
        samples=samples_of(built),
        epochs=config.epochs or (None if config.steps else built.epochs),
        steps=config.steps,
        ways=tuple(sorted(ways, key=lambda way: (not way.fits, way.time.seconds))),
        refused=refused,
        left_out=NEVER_TRIED
        if by_merges is None
        else {k: v for k, v in NEVER_TRIED.items() if k != LOCAL_STEPS},
        repeat_spread=calibration.repeat_spread,
        devices=calibration.devices,
        seconds=time.monotonic() - began,
        notes=tuple(notes),
    )


def whole_batch(task: Task, batch_size: int) -> tuple[int, list[str]]:
    """Returns the samples of a whole step, which are all there are if a batch would have more, and a note on that."""
    samples = samples_of(task)
    if not samples or samples >= batch_size:
        return batch_size, []
    return samples, [
        f"the data set has {samples} samples, fewer than a batch of {batch_size}: a step takes all"
    ]


def with_grains(config: RunConfig, batch_size: int) -> RunConfig:
    """Returns the settings with the grains that batches of this size have, so that trials of smaller ones have them
    too."""
    if config.exact != "bits":
        return config
    bits = ExactBits.chosen(batch_size, config.grain, config.block)
    return config.replace(grain=bits.grain, block=bits.grains_per_block)


def ways_of(
    calibration: Calibration, config: RunConfig, batch_size: int, refused: dict[str, str] | None = None
) -> list[Way]:
    """Returns the ways of a calibration that the settings allow, fastest first.

    Args:
        refused: Gets the ways that the settings do not divide a batch for, with the reason.
    """
    wanted, most = strategy_named(config), one_number(config.processes)
    ways = list[Way]()
    for candidate, costs in calibration.costs.items():
        if (
            (most is None or candidate.ranks <= most)
            and (candidate.ranks == 1 or wanted in ("auto", candidate.strategy))
            and (candidate.ranks == 1 or config.strategy_option in ((), candidate.options))
            and (candidate.ranks == 1 or config.mesh in (None, candidate.mesh))
        ):
            try:
                ways.append(Way(candidate, predicted(costs, candidate, config, batch_size), costs))
            except ShareError as error:  # weights or limits of another number of ranks
                if refused is not None:
                    refused[candidate.words] = str(error)
    alike = dict[Candidate, list[Way]]()
    for way in ways:  # the default all-reduce first, as in the calibration
        alike.setdefault(replace(way.candidate, allreduce=None), []).append(way)
    return sorted(map(best_all_reduce, alike.values()), key=lambda way: way.time.seconds)


def calibrate(
    task: TaskLike,
    config: RunConfig,
    numbers: Sequence[int] = (),
    *,
    options: Mapping[str, Any] | None = None,
    seconds: float = SECONDS,
) -> Calibration:
    """Takes a few steps in each way with several numbers of ranks and at three batch sizes. The first number of ranks,
    which has the fewest ways, comes once more at the end.

    Args:
        numbers: The numbers of ranks. By default from 1 to the processes of the settings.
        seconds: About how long this may take.
    """
    kind, built = kind_taken(config.device), resolve(task, BUILT_IN, options)()
    numbers = numbers or numbers_of_ranks(one_number(config.processes) or default_processes(kind))
    batch_size, load = config.batch_size or built.batch_size, os.getloadavg()[0]
    of_settings, config = counted_settings(config), with_grains(config, batch_size)
    asked = {ranks: rounds_of(ranks, config, batch_size) for ranks in numbers}
    trials = sum(len(pairs) for rounds in asked.values() for pairs in rounds)
    each = (seconds - START_SECONDS * len(numbers)) / trials - SETUP_SECONDS
    each = min(TRIAL_SECONDS[1], max(TRIAL_SECONDS[0], each))
    found, refused, sums = list[Trial](), dict[str, str](), dict[int, SumTimes]()
    began, hopeless = time.monotonic(), set[str]()
    again = numbers[:1] if len(numbers) > 1 else ()  # its trials are over soon, and a run is another start
    for place in range(len(numbers) + len(again)):
        todo = [
            [[pair for pair in pairs if pair[0].strategy not in hopeless] for pairs in asked[ranks]]
            for ranks in [*numbers, *again][place:]
        ]
        wanted = todo[0]
        if not wanted[0]:
            continue
        most = seconds_of_first(todo, seconds - (time.monotonic() - began), usable_cores())
        took, reasons, timed = _tried(task, options, config, wanted, each, most)
        sums |= {each.ranks: each for each in timed}
        hopeless |= {pair[0].strategy for pair in wanted[0] if pair[0].words in reasons} & set(SPECIAL)
        refused |= reasons
        found += [replace(each, start=place) for each in took]
    tried = {
        each: [trial for trial in found if trial.candidate == each] for each in (t.candidate for t in found)
    }
    spread = spread_of(tried.values())
    costs = {each: costs_of(trials, spread or UNREPEATED_SPREAD) for each, trials in tried.items()}
    costs = with_all_reduces(costs, sums, batch_size)
    refused = {name: why for name, why in refused.items() if name not in {each.words for each in costs}}
    devices = tuple(accelerators.name_of(each) or each.type for each in _devices(kind, max(numbers)))
    return Calibration(
        built.name,
        batch_size,
        costs,
        refused,
        spread,
        devices,
        load,
        this_machine(),
        of_settings,
        structure=structure_of(built),
    )


def _tried(
    task: TaskLike,
    options: Mapping[str, Any] | None,
    config: RunConfig,
    rounds: list[Round],
    seconds: float,
    most_seconds: float,
) -> tuple[list[Trial], dict[str, str], list[SumTimes]]:
    plain = config.replace(
        throttle=None, throttle_at=(), balance="equal", memory_limit=None, memory_limit_at=()
    )
    try:
        found = run_trials(task, options, plain, rounds, seconds, most_seconds)
    except EvenerError as error:  # a rank died, or waited in vain
        return [], {rounds[0][0][0].words: str(error)}, []
    refused = {each.candidate.words: each.reason for each in found if isinstance(each, Refusal)}
    sums = [each for each in found if isinstance(each, SumTimes)]
    return [each for each in found if isinstance(each, Trial)], refused, sums


def predicted(costs: StepCosts, candidate: Candidate, config: RunConfig, batch_size: int) -> StepTime:
    """Returns the time of a step with the shares and the emulated speeds of the settings."""
    ranks = candidate.ranks
    factors = (
        Throttle.parse(config.throttle, (), config.throttle.count(",") + 1).factors if config.throttle else ()
    )
    weights = None if config.balance is None else fixed_weights(config.balance, costs.parts)
    balanced = config.balance == "auto"
    speeds = [*factors[:ranks], *[1.0] * (ranks - len(factors))]
    return step_time(
        costs,
        batch_size,
        speeds=speeds,
        weights=weights,
        balanced=balanced,
        max_shares=parse_max_shares(config.max_shares, costs.parts),
        share_multiple_of=config.share_multiple_of,
    )


def _with_memory(
    task: TaskLike, ways: list[Way], config: RunConfig, batch_size: int, options: Mapping[str, Any] | None
) -> tuple[list[Way], list[str]]:
    """Returns the ways with estimates of their memory: of the fastest, and of all that come before the one that is
    chosen."""
    found, unknown, fitting = list[Way](), dict[str, list[str]](), 0
    for way in ways:
        if fitting < ESTIMATED and not way.algorithm:
            try:
                estimate = estimate_memory(
                    task, knowable(way.candidate).config(config, batch_size), options=options
                )
            except ConfigurationError as error:
                unknown.setdefault(str(error), []).append(way.candidate.words)
            else:
                limits = parse_limits(config.memory_limit, way.candidate.ranks)
                own = [each or memory_here(estimate.device, rank) for rank, each in enumerate(limits)]
                worst = max(estimate.ranks, key=lambda each: each.needed - (own[each.rank] or 2**62))
                way = replace(way, needed=worst.needed, limit=own[worst.rank])
            fitting += way.fits
        found.append(way)
    return found, [
        f"no estimate of the memory of {'; '.join(which)}: {why}" for why, which in unknown.items()
    ]


def memory_here(kind: str, rank: int) -> int | None:
    """Returns the bytes of the accelerator that a rank of this machine has. None on a CPU."""
    count = accelerators.count(kind) if kind != "cpu" else 0
    whole = accelerators.memory_of(torch.device(kind, rank % count)) if count else None
    return None if whole is None else whole[1]


def _devices(kind: str, ranks: int) -> list[torch.device]:
    count = accelerators.count(kind) if kind != "cpu" else 0
    return [torch.device(kind, rank % count) if count else torch.device("cpu") for rank in range(ranks)]


def samples_of(task: Task) -> int | None:
    """Returns the number of samples in an epoch. None for a stream."""
    try:
        return len(task.train)  # type: ignore[arg-type]
    except TypeError:
        return None
