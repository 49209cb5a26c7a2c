"""Small runs that test a strategy. Each returns its results as named tensors.

The same functions run on one device, as the reference, and on several ranks with the strategy.
"""

from __future__ import annotations

import gc
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from evener.core.config.run_config import Recipe, RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.distributed.mesh import Layout
from evener.distributed.session import Session
from evener.errors import DivergenceError
from evener.tools.conformance import tasks
from evener.torch_internals.process_groups import groups_open
from evener.training.engine import Engine

Chosen = str | Recipe | tuple[Recipe, ...]
"""A strategy, or several that divide the axes of a mesh together."""
Findings = dict[str, Tensor]
"""Results of a run: ``weight NAME``, ``loss of step N`` and others, in float64 on the CPU."""

STEPS, HALF = 7, 4
"""Steps of a run, and the steps before the checkpoint in a run that is resumed elsewhere."""


class NotKeptError(Exception):
    """Raised if a promise is not kept. The message says how."""


@dataclass(frozen=True)
class TrialRanks:
    """The session and the strategy that a trial runs with."""

    strategy: Chosen
    session: Session
    parts: int = 1
    """Number of weights that ``balance`` takes."""
    mesh: str | None = None

    @property
    def words(self) -> str:
        """The strategy as text, for messages."""
        return ",".join(map(str, self.strategy)) if isinstance(self.strategy, tuple) else str(self.strategy)

    def engine(self, task: Task, **settings: Any) -> Engine:
        """Opens an engine in float64. Replaces a ``balance`` of ``uneven`` or ``idle`` by weights for the ranks."""
        if "balance" in settings:
            settings["balance"] = self._weights(settings["balance"])
        usual = {"steps": STEPS, "strategy": self.strategy, "mesh": self.mesh, "dtype": "float64"}
        usual |= {"check_replicas": 0}  # the test compares replicas itself
        config = RunConfig(**(usual | settings))
        return Engine(task, config, session=self.session)

    def _weights(self, how: str) -> str:
        if self.parts == 1:
            return "equal"
        first = 0 if how == "idle" else self.parts + 1
        return ",".join(str(weight) for weight in [first, *range(self.parts - 1, 0, -1)])


@contextmanager
def alone(device: str, timeout_seconds: float) -> Iterator[TrialRanks]:
    """Opens a session on one device, also if this process is a rank."""
    with Session(device, timeout_seconds, Environment()) as session:
        yield TrialRanks("single", session)


@dataclass(frozen=True)
class StrategyTrial:
    """A promise, and the run that tests it."""

    name: str
    """Name by which the trial can be left out."""
    promise: str
    run: Callable[[TrialRanks, StrategyTrial], Findings]
    task: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_reference: bool = True
    """True if the results are compared with those of one device."""

    @property
    def words(self) -> str:
        """The task and the settings as text, for messages."""
        return ", ".join([f"task {self.task}", *(f"{key} {value}" for key, value in self.settings.items())])

    def engine(self, place: TrialRanks, **settings: Any) -> Engine:
        """Opens an engine with the task of the trial."""
        return place.engine(getattr(tasks, self.task)(), **(dict(self.settings) | settings))


def train(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Takes all steps; returns losses and weights."""
    with trial.engine(place) as engine:
        return _trained(engine)


def _trained(engine: Engine) -> Findings:
    taken = [engine.step(batch) for batch in engine.batches()]
    losses = {f"loss of step {step.number}": _number(step.loss) for step in taken}
    return losses | _weights(engine)


def _weights(engine: Engine) -> Findings:
    found = _named("weight", engine.learner.tensors())
    if engine.learner.average.number:
        with engine.learner.average.shown():
            found |= _named("average of", engine.learner.tensors())
    return found


def _named(what: str, tensors: Mapping[str, Tensor]) -> Findings:
    return {f"{what} {name}": value.detach().cpu().double().clone() for name, value in tensors.items()}


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def by_hand(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Takes the steps in a hand-written loop; returns losses and weights."""
    losses: Findings = {}
    with trial.engine(place) as engine:
        for batch in engine.batches():
            micro = batch.micro_batches[0]
            outputs = engine.model(micro.inputs)
            total = nn.functional.cross_entropy(outputs, micro.targets, reduction="sum")
            mean = engine.backward(total, len(micro.targets))
            losses[f"loss of step {engine.steps_done}"] = _number(mean)
            engine.update()
        return losses | _weights(engine)


def evaluate(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Returns the metrics over two sets, one of which has only two samples."""
    with trial.engine(place) as engine:
        _trained(engine)
        few = Subset(engine.task.train, [1, 0])
        metrics = {"evaluation": engine.evaluate(), "evaluation of two samples": engine.evaluate(few)}
        weights = _weights(engine)
    return weights | {
        f"{name} of the {of}": _number(value)
        for of, found in metrics.items()
        for name, value in found.items()
    }


def predict(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Returns the predictions in order. Checks the calls that return them on rank 0 alone and on all ranks."""
    with trial.engine(place, steps=2) as engine:
        _trained(engine)
        everywhere: Any = engine.predict(engine.task.train, everywhere=True)
        given = engine.predict(engine.task.train)
    if (given is not None) != (place.session.rank == 0):
        gave = "nothing" if given is None else "outputs"
        raise NotKeptError(f"predict() gave rank {place.session.rank} {gave}; they are for rank 0 alone")
    if given is not None and not torch.equal(given, everywhere):
        raise NotKeptError("predict() gave rank 0 other outputs than it gave all ranks")
    return {"predictions": everywhere.double()}


def into_one(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Resumes on one device, from a checkpoint of the ranks and from their ``state_dict()``."""
    control = place.session.control
    with tempfile.TemporaryDirectory() as made:
        directory = Path(control.broadcast_object(made))
        with trial.engine(place, steps=HALF) as engine:
            _trained(engine)
            engine.save(directory)
            state = engine.state_dict()
        with _one_device(place) as one:
            from_file = _gone_on(one, trial, lambda engine: engine.load(directory))
            from_state = _gone_on(one, trial, lambda engine: engine.load_state_dict(state))
        control.barrier()  # rank 0 removes the files after all ranks have read them
    return _both(from_file, from_state)


def from_one(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Resumes on the ranks, from a checkpoint of one device and from its ``state_dict()``."""
    with tempfile.TemporaryDirectory() as directory:
        with _one_device(place) as one, trial.engine(one, steps=HALF) as engine:
            _trained(engine)
            engine.save(Path(directory))
            state = engine.state_dict()
        from_file = _gone_on(place, trial, lambda engine: engine.load(Path(directory)))
        from_state = _gone_on(place, trial, lambda engine: engine.load_state_dict(state))
    return _both(from_file, from_state)


def _one_device(place: TrialRanks) -> Any:
    return alone(place.session.device.type, place.session.timeout_seconds)


def _gone_on(place: TrialRanks, trial: StrategyTrial, load: Callable[[Engine], None]) -> Findings:
    with trial.engine(place) as engine:
        load(engine)
        return _trained(engine)


def _both(from_file: Findings, from_state: Findings) -> Findings:
    return from_file | {f"{name}, from state_dict()": value for name, value in from_state.items()}


def reference_of(trial: StrategyTrial) -> Callable[[TrialRanks, StrategyTrial], Findings]:
    """Returns the function that one device runs for comparison."""
    return whole_run if trial.run in (into_one, from_one) else trial.run


def whole_run(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Returns the reference of :func:`into_one` and :func:`from_one`: the end of a run that was never stopped."""
    found = train(place, trial)
    late = {name: value for name, value in found.items() if not _is_early(name)}
    return _both(late, late)


def _is_early(name: str) -> bool:
    step = re.fullmatch(r"loss of step (\d+)", name)
    return step is not None and int(step[1]) < HALF


def fail(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Makes numbers of the last rank NaN in the last step, and checks that the error names this rank. As it is the last
    step, no rank is left waiting for another.
    """
    rank, what = place.session.world_size - 1, trial.settings["what"]
    with place.engine(tasks.broken(what, rank), steps=HALF) as engine:
        said = _said(engine)
    if not re.search(rf"\brank {rank}\b", said):
        raise NotKeptError(f"a {what} of rank {rank} is not a number, and the error says: {said}")
    return {}


def _said(engine: Engine) -> str:
    try:
        _trained(engine)
    except DivergenceError as error:
        return str(error)
    return "nothing, the run went on"


def close(place: TrialRanks, trial: StrategyTrial) -> Findings:
    """Closes each of two engines twice. Checks that nothing is left of the engine, and that another can be opened."""
    session, before = place.session, _owned()
    for _ in range(2):
        engine = trial.engine(place, steps=2)
        model = weakref.ref(engine.model)
        _trained(engine)
        engine.close()
        engine.close()
        del engine
    session.lay(Layout({"data": session.world_size}))
    gc.collect()
    left = [
        f"{after - more} {what}"
        for what, more, after in zip(_KINDS, before, _owned(), strict=True)
        if after > more
    ]
    if model() is not None:
        left.append("the model")
    if left:
        raise NotKeptError(f"after close() there are still {' and '.join(left)}")
    return {}


_KINDS = ("process groups more than before", "threads more than before")


def _owned() -> tuple[int, int]:
    gc.collect()
    return groups_open(), threading.active_count()
