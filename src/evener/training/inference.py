"""Applies a trained model on all ranks: evaluation and predictions from a checkpoint of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evener import checkpoint
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import shown
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
class InferenceSetup:
    """Checkpoint, task and settings for evaluation or prediction.

    Raises:
        ConfigurationError: If there is no checkpoint, or its task is unknown.
    """

    weights: Path
    """Path of the checkpoint."""
    steps: int
    epoch: int
    """Epoch of the last evaluation before the checkpoint, from 0."""
    task: TaskLike
    options: dict[str, Any]
    config: RunConfig

    @classmethod
    def from_run(
        cls,
        run: Path,
        task: TaskLike | None = None,
        config: RunConfig | None = None,
        options: Mapping[str, Any] | None = None,
        trust: bool = False,
    ) -> InferenceSetup:
        """Sets up from the latest checkpoint of a run directory, or from a given checkpoint, with the run's own task.

        Args:
            task, options: The name of the task and arguments for its function. They are added to the run's arguments,
                which apply only to the run's own task.
            config: All settings. If None, those settings of the run that decide what is computed.
            trust: Whether to build the run's own task even if it does not come with Evener. Its name may be that of any
                function, which is then executed.
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
        """Calls ``act`` on each rank with an engine that has the weights; returns the results of the local ranks."""
        return launch(
            _Job(self, act),
            processes=Headcount((check_plan(self.config, rendezvous),)),
            timeout_seconds=self.config.timeout_seconds,
            rendezvous=rendezvous,
            device=self.config.device,
        )


@dataclass(frozen=True)
class _Job:
    """The job that a rank runs. The launcher sends it to the rank."""

    applied: InferenceSetup
    act: Callable[[Engine], Any]

    def __call__(self) -> Any:
        applied, config = self.applied, self.applied.config
        with Session(device=config.device, timeout_seconds=config.timeout_seconds) as session:
            task = resolve(applied.task, BUILT_IN, applied.options)()
            with Engine(task, config, session=session) as engine:
                engine.state.load_average(applied.weights)
                return self.act(engine)


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation."""

    checkpoint: str
    steps: int
    epoch: int
    """The epoch as the run counted it, from 0."""
    metrics: dict[str, float]
    samples: int | None
    ranks: int
    rank: int = 0
    """The rank that returned this result."""


class _Heard(Observer):
    samples: int | None = None
    everywhere = True

    def evaluation(self, record: EvaluationRecord) -> None:
        self.samples = record.samples


def evaluate_run(
    applied: InferenceSetup, data: str | None = None, rendezvous: Rendezvous | None = None
) -> Evaluated:
    """Returns the task's loss and metrics, in the form that training reports.

    Args:
        data: The dataset, as `dataset_called` names it. If None, the task's own.

    Raises:
        EvenerError: Whatever ended the evaluation.
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
        at = (shown(applied.weights), applied.steps, applied.epoch)
        return Evaluated(*at, metrics, heard.samples, session.world_size, session.rank)

    return applied.on_all_ranks(act, rendezvous)[0]


def predict_run(
    applied: InferenceSetup,
    data: str = "evaluate",
    *,
    targets: bool = True,
    rendezvous: Rendezvous | None = None,
) -> Tree | None:
    """Returns the outputs for all samples of a dataset in its order. Returns None if this process is a rank other than
    0.

    Args:
        data: The dataset, as `dataset_called` names it.
        targets: Whether items are pairs ``(inputs, targets)``; rows of files never are.

    Raises:
        EvenerError: Whatever ended the prediction.
    """

    def act(engine: Engine) -> Tree | None:
        dataset = dataset_called(data, engine.task)
        return engine.predict(dataset, targets=targets and not has_inputs_alone(data))

    return applied.on_all_ranks(act, rendezvous)[0]
