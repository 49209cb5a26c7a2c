"""A trained model applied on all ranks: the evaluation and the predictions of a run that is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evener import checkpoint
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import EvaluationRecord
from evener.core.task.task import TaskLike, resolve
from evener.core.types import Tree
from evener.distributed.launch.launch import launch
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.training.builtin_tasks import BUILT_IN
from evener.training.engine import Engine
from evener.training.fit import check_plan
from evener.training.prediction_files import dataset_called, has_inputs_alone
from evener.training.reporting.task_file import origin

R = TypeVar("R")


@dataclass(frozen=True)
class Applied:
    """What a model is applied with.

    Raises:
        ConfigurationError: If there is no checkpoint, or nobody says which task it is of.
    """

    weights: Path
    """A checkpoint."""
    steps: int
    epoch: int
    """The epoch that the last evaluation before it was of, from 0."""
    task: TaskLike
    options: dict[str, Any]
    config: RunConfig

    @classmethod
    def of(
        cls,
        run: Path,
        task: TaskLike | None = None,
        config: RunConfig | None = None,
        options: Mapping[str, Any] | None = None,
        trust: bool = False,
    ) -> Applied:
        """The latest checkpoint of a run directory, or the one that is named, with the run's own task.

        Args:
            task, options: What the task is called, and arguments of its function besides those of the run, which the
                run's own task alone has.
            config: All settings; None takes those of the run that decide what is computed.
            trust: Whether the run's own task is built also where it is none that comes with Evener: its name may be
                that of any function, which runs as it is.
        """
        found, known = checkpoint.find(run), origin(run)
        chosen, of_run = known.chosen(run, task, trust)
        of_task = {**of_run, **(options or {})}
        resolve(chosen, BUILT_IN, of_task)
        config = config or RunConfig(**known.settings)
        config = config.replace(weights=found.path, resume=None, run_dir=None)
        progress = found.rest["progress"]
        epoch = max(0, int(progress["epoch"]) - (progress["position"] == 0))
        return cls(found.path, int(progress["steps"]), epoch, chosen, of_task, config)

    def on_all_ranks(self, act: Callable[[Engine], R], rendezvous: Rendezvous | None = None) -> list[R]:
        """What ``act`` gave on each rank of this machine, for an engine that has the weights."""
        return launch(
            _Job(self, act),
            processes=Headcount((check_plan(self.config, rendezvous),)),
            timeout_seconds=self.config.timeout_seconds,
            rendezvous=rendezvous,
            device=self.config.device,
        )


@dataclass(frozen=True)
class _Job:
    """What a rank is sent to do."""

    applied: Applied
    act: Callable[[Engine], Any]

    def __call__(self) -> Any:
        applied, config = self.applied, self.applied.config
        with Session(device=config.device, timeout_seconds=config.timeout_seconds) as session:
            task = resolve(applied.task, BUILT_IN, applied.options)()
            with Engine(task, config, session=session) as engine:
                return self.act(engine)


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation came to."""

    checkpoint: str
    steps: int
    epoch: int
    """As the run told of it, from 0."""
    metrics: dict[str, float]
    samples: int | None
    ranks: int
    rank: int = 0
    """The rank that it comes from."""


class _Heard(Observer):
    samples: int | None = None
    everywhere = True

    def evaluation(self, record: EvaluationRecord) -> None:
        self.samples = record.samples


def evaluate_run(
    applied: Applied, data: str | None = None, rendezvous: Rendezvous | None = None
) -> Evaluated:
    """The loss and the metrics of the task, as training tells them.

    Args:
        data: The dataset, as `dataset_called` names it; None is the task's own.

    Raises:
        EvenerError: Whatever ended it.
    """

    if data is not None and has_inputs_alone(data):
        raise ConfigurationError(
            f"{data} holds inputs without targets, with which nothing can be compared: name a dataset as "
            "package.module:dataset"
        )

    def act(engine: Engine) -> Evaluated:
        heard = _Heard()
        engine.observers.add(heard)
        metrics = engine.evaluate(None if data is None else dataset_called(data, engine.task))
        session = engine.session
        at = (str(applied.weights), applied.steps, applied.epoch)
        return Evaluated(*at, metrics, heard.samples, session.world_size, session.rank)

    return applied.on_all_ranks(act, rendezvous)[0]


def predict_run(
    applied: Applied, data: str = "evaluate", *, targets: bool = True, rendezvous: Rendezvous | None = None
) -> Tree | None:
    """The outputs for all samples of a dataset, in its order; None where this process is a rank other than 0.

    Args:
        data: The dataset, as `dataset_called` names it.
        targets: Whether items are pairs ``(inputs, targets)``; rows of files never are.

    Raises:
        EvenerError: Whatever ended it.
    """

    def act(engine: Engine) -> Tree | None:
        dataset = dataset_called(data, engine.task)
        return engine.predict(dataset, targets=targets and not has_inputs_alone(data))

    return applied.on_all_ranks(act, rendezvous)[0]
