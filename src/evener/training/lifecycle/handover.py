"""Keeps the training state on the surviving ranks while a dead rank is replaced, and gives it to the new rank.

Each replica holds the whole training state. When a rank dies, the others keep the state after the last step that they
took. At the next start, the most advanced rank broadcasts its state::

    rank 0   step 7 ─ step 8 ─ step 9 ...        ┌─▶ the state after step 8, to all ─▶ step 9
    rank 1   step 7 ─ step 8 ─ ✝                 │
    rank 2   step 7 ─ step 8 (its update is due) ┘

A rank that was in the middle of an update has no usable state. Buffers that a forward pass changed are restored. The
random generators differ between ranks, and those of a dead rank are lost with it. So each rank stores its own, before
it gives the last gradients of a step, in a file that outlives it (:mod:`evener.training.state.rng_file`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.distributed.failure import is_communication_error
from evener.distributed.recovery.deferred_free import bury
from evener.distributed.recovery.regroup import RegroupError
from evener.distributed.recovery.replacement import (
    ALLOWED,
    NEWS_SECONDS,
    NothingKeptError,
    RecalledError,
    Start,
    SurvivorLease,
    is_successor,
)
from evener.distributed.session import RUN_DIR
from evener.distributed.signals import asked
from evener.errors import InterruptedRunError, RankError
from evener.strategies.ddp import Ddp
from evener.training.engine import Engine
from evener.training.factory import strategy_of
from evener.training.state.rng_file import Generators

_CHANGE_SECONDS = 60.0
"""Longest time that a rank waits for the ranks that leave, before all start again from the last checkpoint."""
_GIVEN_UP = "evener_given_up"
"""Name of the attribute that marks the parameters of a module whose engine was given up."""


@dataclass
class CarriedState:
    """The state that a surviving rank carries over into the next start."""

    steps: int = -1
    """Number of steps that the state includes; -1 if there is no state."""
    state: dict[str, Any] | None = None
    """Model and optimizer state. Set to None once it is loaded, because it is as large as model and optimizer."""
    records: tuple[StepRecord, ...] = ()
    """Records of the last steps."""
    begun: Any = None
    """What is done of the step after those, if the state includes it (`Stepper.interrupted`)."""


class Recent(Observer):
    """Keeps the records of the last steps on every rank, because rank 0 may die before it has written one."""

    everywhere = True

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=4)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)


class RestartWithStateError(RecalledError):
    """Raised on a surviving rank that continues in another start with the state ``heir``."""

    def __init__(self, start: Start, heir: CarriedState) -> None:
        super().__init__(start)
        self.heir = heir


class RankReplacement:
    """Handles rank replacement during a run, on one rank."""

    def __init__(self, engine: Engine, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._engine, self._recent = engine, Recent()
        self._generators = Generators(run_dir / f"generators-{engine.session.rank}")
        engine.observers.add(self._recent)
        engine.learner.may_leave_out = True
        engine.learner.when_drawn = lambda step: self._generators.keep(step + 1)

    @contextmanager
    def staying(self, let_go: Callable[[], None]) -> Iterator[None]:
        """Returns a context in which this rank survives when others die.

        Args:
            let_go: Called first when that happens; closes the data that are being read.

        Raises:
            RestartWithStateError: If others have died and the next start is announced.
        """
        session = self._engine.session
        self._generators.keep(self._engine.steps_done)
        goes_on = self._engine.learner.stepper.outlives_ranks
        with SurvivorLease(self.run_dir, session.rank, session.watchdog.hush, goes_on=goes_on) as stay:
            try:
                yield
                stay.leave()
            except Exception as error:
                start = _called(stay, error)
                if start is None:
                    raise
                let_go()
                raise RestartWithStateError(start, self._hand_on(isinstance(error, RegroupError))) from None

    def inherit(self, heir: CarriedState) -> tuple[CarriedState, str]:
        """Loads the state of the most advanced rank. Returns it and a message for the user. A collective call.

        Raises:
            NothingKeptError: If no rank has a state, so that all have to start again.
        """
        engine, control = self._engine, self._engine.session.control
        places = control.gather_objects((heir.steps, heir.begun is not None))
        best, source = max(places)[0], places.index(max(places))
        if best < 0:
            raise NothingKeptError("no rank that stayed was between two updates: all have to start again")
        found: CarriedState = control.broadcast_object(
            heir if engine.session.rank == source else None, source
        )
        assert found.state is not None
        engine.state.load_state(found.state)
        engine.learner.stepper.before = found.begun
        heir.state = found.state = None
        lost = [
            rank
            for rank, known in enumerate(control.gather_objects(self._generators.draw(best)))
            if not known
        ]
        message = f"goes on after step {best} with what rank {source} had in memory"
        unknown = f"; the random generators of rank {lost} begin anew" if lost else ""
        return found, message + unknown

    def _hand_on(self, between_steps: bool) -> CarriedState:
        """Gives up this rank's engine and returns the state to carry over."""
        engine, steps = self._engine, self._engine.steps_done
        engine.give_up()
        if between_steps:
            self._generators.keep(steps)
        elif self._generators.kept <= steps:  # another rank may have finished this step
            self._generators.keep(steps + 1)
        begun = engine.learner.stepper.interrupted
        heir = self._heir(begun) if begun is not None or engine.learner.updating != steps else CarriedState()
        _release(engine)
        return heir

    def _heir(self, begun: Any) -> CarriedState:
        engine, steps = self._engine, self._engine.steps_done
        if begun is None:
            engine.learner.undo(steps)
        with suppress(RankError, RuntimeError):
            engine.step_sync.settle_before(steps)
            engine.tell()
        records = [record for record in self._recent.steps if record.step < steps]
        if lost := engine.step_sync.lost_before(steps):
            records.append(lost.record())
        return CarriedState(steps, engine.state.local_state(), tuple(records), begun)


def _called(stay: SurvivorLease, error: Exception) -> Start | None:
    """Returns the start that this rank is called to, or None if there is none.

    After a communication error it waits for the call: a rank notices the loss of another before the agent acts on it.
    When the number of ranks changes it waits, too: the agent waits until those that leave have ended.
    """
    if isinstance(error, RegroupError) and error.stays:
        if start := stay.called(_CHANGE_SECONDS):
            return start
        raise RankError(f"the ranks that leave have not ended within {_CHANGE_SECONDS:g} s") from error
    if asked() is not None or isinstance(error, InterruptedRunError):
        return None
    return stay.called(NEWS_SECONDS if is_communication_error(error) else 0.0)


def succession(engine: Engine) -> RankReplacement | None:
    """Returns the rank replacement, or None if all ranks have to start again together.

    That is so with another launcher, several machines, a GPU, a sharded state, or ``recover`` other than "memory". A
    single rank, which others may join, has all of the state.
    """
    session, learner = engine.session, engine.learner
    launcher = os.environ.get(RUN_DIR) if engine.config.recover == "memory" else None
    whole = session.world_size == 1 or (
        learner.synchronizer.holds_all and learner.data.degree == session.world_size
    )
    here = session.device.type == "cpu" and session.environment.local_world_size == session.world_size
    allowed = ALLOWED in os.environ and launcher is not None
    return RankReplacement(engine, Path(launcher)) if launcher and allowed and whole and here else None


def keeps_memory(config: RunConfig, ranks: int, then: int) -> bool:
    """Returns True if the ranks that stay can go on with what they have in memory when their number changes.

    Args:
        ranks: The number of ranks now, which have `succession`.
        then: The number of ranks after the change.
    """
    return all(isinstance(strategy_of(config, count), Ddp) for count in (ranks, then) if count > 1)


def succeeds() -> bool:
    """Returns True if this process takes part in a start that other ranks have survived into."""
    launcher = os.environ.get(RUN_DIR)
    return launcher is not None and is_successor(Path(launcher))


def made_anew(make: Callable[[], nn.Module]) -> nn.Module:
    """Makes the model for another start on a surviving rank.

    Raises:
        NothingKeptError: If ``make`` returns the module of the previous start, whose weights are freed and whose hooks
            are not.
    """
    model = make()
    if any(hasattr(parameter, _GIVEN_UP) for parameter in model.parameters()):
        raise NothingKeptError(
            "Task.model returned a module that this process has trained before, and cannot be made anew: all ranks "
            "have to start again. Make the module in the function"
        )
    return model


def _release(engine: Engine) -> None:
    """Frees weights, optimizer state and data of an engine that is given up but cannot be destroyed yet."""
    engine.state.saver.give_up()
    engine.learner.optimizer.state.clear()
    engine.learner.average.free()
    if engine.learner.exact is not None:
        engine.learner.exact.free()
    for parameter in engine.model.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        setattr(parameter, _GIVEN_UP, True)
    for name in ("task", "state", "feed"):
        vars(engine).pop(name)
    bury(engine, engine.learner.give_up())
