"""What is tried with strategies of several devices in one process, and one device to compare with."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.strategies.base import Strategy
from evener.tools.conformance import tasks
from evener.tools.conformance.harness import Findings, TrialRanks, alone, reference_of
from evener.tools.conformance.strategies import difference
from evener.tools.conformance.trials import TRIALS
from evener.training.engine import Engine

TRIED = [trial for trial in TRIALS if trial.name != "error"]
"""All but those in which one rank of several fails."""


@functools.cache
def on_one_device(number: int) -> Findings:
    with alone("cpu", 60.0) as place:
        return reference_of(TRIED[number])(place, TRIED[number])


def try_all(strategy: Strategy) -> None:
    """Raises unless all trials come to what one device does."""
    with Session("cpu", 60.0, Environment()) as session:
        place = TrialRanks(strategy, session)
        for number, trial in enumerate(TRIED):
            found = trial.run(place, trial)
            seen = difference(on_one_device(number), found) if trial.has_reference else None
            assert seen is None, f"{trial.name} ({trial.words}): {seen}"


@contextmanager
def engine_of(task: Task, strategy: Strategy | str, **settings: Any) -> Iterator[Engine]:
    usual = {"device": "cpu", "dtype": "float64", "steps": 3}
    with Engine(task, strategy=strategy, **(usual | settings)) as engine:
        yield engine


def trained(task: Task, strategy: Strategy | str, **settings: Any) -> dict[str, Any]:
    """The weights after some steps, on the CPU."""
    with engine_of(task, strategy, **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.state_dict()["model"]


def task_of(model: Any = None, **parts: Any) -> Task:
    """A small task with a model, or other parts, of one's own."""
    changed = parts | ({} if model is None else {"model": model})
    return Task(**(vars(tasks.plain()) | changed))


def refused(
    kind: type[BaseException], words: str, task: Task, strategy: Strategy | str, **settings: Any
) -> None:
    with pytest.raises(kind, match=words):
        trained(task, strategy, **settings)
