"""Takes a few real steps in each of several ways, on ranks of this machine, and times them.

A trial goes through the engine, as a run does. So what it measures holds all that a step costs: passes, sums, the
update, waiting, reading of samples, and how ranks of one machine slow each other down.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.launch.launch import launch
from evener.distributed.session import Session
from evener.errors import EvenerError
from evener.strategies.ddp import DdpSum
from evener.strategies.pipeline.stepper import PipelineStepper
from evener.strategies.synchronizer import Synchronizer
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.measured import unclear
from evener.tools.plan.rounds import Round, steps_in
from evener.tools.plan.sum_trials import SumTimes, time_sums
from evener.tools.plan.trial import Trial
from evener.training.builtin_tasks import BUILT_IN
from evener.training.engine import Engine

WARM_STEPS = 2
"""Steps before those that count. In them the optimizer makes its state and buckets are laid out. The next one says how
many there is time for."""
TIMEOUT_SECONDS = 60.0
NO_TIME = "there was no time to try it"


@dataclass(frozen=True)
class Refusal:
    """A candidate that cannot train the task, with the reason."""

    candidate: Candidate
    reason: str


def run_trials(
    task: TaskLike,
    options: Mapping[str, Any] | None,
    config: RunConfig,
    rounds: Sequence[Round],
    seconds: float,
    most_seconds: float,
) -> list[Trial | Refusal | SumTimes]:
    """Runs trials one after the other on ranks of this machine.

    A machine is often slower for some seconds, and what is tried just then would look slower than the rest. So a trial
    is repeated in another round, with all others in between. In later rounds the fastest ways come first, as long as
    there is time. If there is little, trials take fewer steps, so that more of them are made. What has taken different
    times is tried once more.

    Args:
        rounds: A candidate that fails with the first size of all is refused. Another size is left out alone.
        seconds: About how long each trial takes its steps at most.
        most_seconds: No further trial begins after this time.

    Returns:
        The trials, refusals, and the times of all-reduces if ``ddp`` was tried with the default one.

    Raises:
        RankError: If a rank died.
    """
    ranks = rounds[0][0][0].ranks
    settings = (task, options, config, [list(each) for each in rounds], seconds, most_seconds)
    return launch(
        _on_rank, *settings, processes=ranks, device=config.device, timeout_seconds=TIMEOUT_SECONDS
    )[0]


def _on_rank(
    task: TaskLike,
    options: Mapping[str, Any] | None,
    config: RunConfig,
    rounds: list[Round],
    seconds: float,
    most_seconds: float,
) -> list[Trial | Refusal | SumTimes]:
    built = resolve(task, BUILT_IN, options)()
    found, refused, sums = list[Trial](), dict[Candidate, str](), list[SumTimes]()
    began, timed = time.perf_counter(), config.allreduce is None and config.compress is None
    needed, failed = rounds[0][0][1], set[tuple[Candidate, int]]()
    with Session(device=config.device, timeout_seconds=TIMEOUT_SECONDS) as session, quiet():
        timed &= session.inner_backend is None
        for number in range(len(rounds) + 1):
            paces = {each.candidate: each.pace for each in found}
            wanted = rounds[number] if number < len(rounds) else unclear(found)
            paces, wanted = session.control.broadcast_object((paces, wanted))
            todo = sorted(wanted, key=lambda pair: paces.get(pair[0], 0.0))
            for place, (candidate, batch_size) in enumerate(todo):
                left = most_seconds - session.control.broadcast_object(time.perf_counter() - began)
                if left < 0:
                    refused.setdefault(candidate, NO_TIME)
                if candidate in refused or (candidate, batch_size) in failed:
                    continue
                others = sum(each not in refused for each, _ in chain(todo[place:], *rounds[number + 1 :]))
                try:
                    trial = _one(built, candidate, batch_size, config, session, (seconds, left / others))
                except Exception as error:  # of a model, too, which may not bear to be divided so
                    failed.add((candidate, batch_size))
                    if batch_size == needed:
                        kind = "" if isinstance(error, EvenerError) else f"{type(error).__name__}: "
                        refused[candidate] = f"{kind}{error}"
                else:
                    if batch_size == needed or not trial.retries:
                        found.append(trial)
            usual = next((each for each in found if each.gradient_nbytes), None)
            if usual is not None and timed and not sums:
                sums.append(time_sums(session, usual.bucket_nbytes, usual.gradient_nbytes))
    tried = {each.candidate for each in found}
    late = {each for each, reason in refused.items() if reason == NO_TIME and each in tried}
    return [*found, *(Refusal(*each) for each in refused.items() if each[0] not in late), *sums]


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what strategies and models print."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),
        redirect_stdout(nowhere),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def _one(
    task: Task,
    candidate: Candidate,
    batch_size: int,
    config: RunConfig,
    session: Session,
    seconds: tuple[float, float],
) -> Trial:
    """Tries a candidate for ``seconds`` of steps and in all."""
    began = time.perf_counter()
    with Engine(task, candidate.config(config, batch_size), session=session) as engine:
        taken, records, left = list[float](), [], WARM_STEPS + 1
        with closing(engine.batches()) as batches:
            while left:
                start = time.perf_counter()
                step = engine.step(next(batches))
                step.loss  # noqa: B018 # waits for the step
                taken.append(time.perf_counter() - start)
                records.append(step)
                left -= 1
                if len(taken) == 1:
                    setup = time.perf_counter() - began
                if len(taken) == WARM_STEPS + 1:
                    spare = seconds[1] - (time.perf_counter() - began)
                    left = session.control.broadcast_object(steps_in(min(seconds[0], spare), taken[-1]) - 1)
        counted = [step.record() for step in records[WARM_STEPS:]]
        # The last batch of an epoch is smaller, and so is a small set.
        whole = max(each.samples for each in counted)
        kept = [place for place, each in enumerate(counted) if each.samples == whole]
        stepper = engine.learner.stepper
        return Trial(
            candidate,
            whole,
            counted[kept[-1]].shares,
            tuple(taken[WARM_STEPS + place] for place in kept),
            _medians([counted[place].compute_seconds for place in kept]),
            _medians([counted[place].input_seconds for place in kept]),
            setup,
            *_sums_of(engine.learner.synchronizer),
            pieces=stepper.pieces if isinstance(stepper, PipelineStepper) else 1,
            retries=sum(int(each) for step in records for each in step.retries),
        )


def _sums_of(synchronizer: Synchronizer) -> tuple[int, int]:
    """Returns the bytes of a bucket and of all gradients that ``ddp`` sums over the ranks."""
    if not isinstance(synchronizer, DdpSum):
        return 0, 0
    return synchronizer.bucket_bytes, synchronizer.gradient_nbytes


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(median(column) for column in zip(*(row for row in rows if row), strict=True))
