"""What a rank that stays carries over when another one is replaced, and how the new one comes by it.

Replicas hold the whole state of the training, each of them. When a rank dies, those that stay keep theirs as it was
after the last step that they took, and in the next start the most advanced gives its own to all::

    rank 0   step 7 ─ step 8 ─ step 9 ...        ┌─▶ the state after step 8, to all ─▶ step 9
    rank 1   step 7 ─ step 8 ─ ✝                 │
    rank 2   step 7 ─ step 8 (its update is due) ┘

A rank that was in the midst of an update has nothing to give. Buffers that a forward pass wrote to are put back. The
random generators differ between ranks, and those of a rank that died are gone with it: so each leaves its own, before
it gives the last gradients of a step, where they outlive it (:mod:`evener.training.state.rng_file`).
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

from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.distributed.failure import is_communication_error
from evener.distributed.recovery.deferred_free import bury
from evener.distributed.recovery.replacement import (
    ALLOWED,
    NEWS_SECONDS,
    RecalledError,
    Start,
    Stay,
    is_successor,
)
from evener.distributed.session import RUN_DIR
from evener.distributed.signals import asked
from evener.errors import InterruptedRunError, RankError
from evener.training.engine import Engine
from evener.training.state.rng_file import Generators

_GIVEN_UP = "evener_given_up"
"""Marks the parameters of a module whose engine lies in a grave."""


@dataclass
class Heir:
    """What a rank carries over."""

    steps: int = -1
    """After which the state is; -1 if there is none."""
    state: dict[str, Any] | None = None
    """None again once it was taken up, for it is as large as model and optimizer."""
    told: tuple[StepRecord, ...] = ()
    """Of the last steps."""


class Recent(Observer):
    """The records of the last steps, on every rank: rank 0 may die before it has written one."""

    everywhere = True

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=4)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)


class HandedOnError(RecalledError):
    """This rank goes on in another start, with what ``heir`` holds."""

    def __init__(self, start: Start, heir: Heir) -> None:
        super().__init__(start)
        self.heir = heir


class Succession:
    """The part of a run in which ranks may be replaced, on one of them."""

    def __init__(self, engine: Engine, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._engine, self._recent = engine, Recent()
        self._generators = Generators(run_dir / f"generators-{engine.session.rank}")
        engine.observers.add(self._recent)
        engine.learner.may_leave_out = True
        engine.learner.when_drawn = lambda step: self._generators.keep(step + 1)

    @contextmanager
    def staying(self, let_go: Callable[[], None]) -> Iterator[None]:
        """Within the block this rank stays if others die.

        Args:
            let_go: Called first when that happens: gives back what is at hand of the data.

        Raises:
            HandedOnError: Others have died, and the next start is announced.
        """
        session = self._engine.session
        self._generators.keep(self._engine.steps_done)
        with Stay(self.run_dir, session.rank, session.watchdog.hush) as stay:
            try:
                yield
                stay.leave()
            except Exception as error:
                start = _called(stay, error)
                if start is None:
                    raise
                let_go()
                raise HandedOnError(start, self._hand_on()) from None

    def inherit(self, heir: Heir) -> tuple[Heir, str]:
        """Takes up the state of the most advanced rank; gives that, and what is to be said of it. A collective call.

        Raises:
            RankError: If no rank has one, so that all have to start again.
        """
        engine, control = self._engine, self._engine.session.control
        steps = control.gather_objects(heir.steps)
        best = max(steps)
        if best < 0:
            raise RankError("no rank that stayed was between two updates: all have to start again")
        source = steps.index(best)
        found: Heir = control.broadcast_object(heir if engine.session.rank == source else None, source)
        assert found.state is not None
        engine.state.take(found.state)
        heir.state = found.state = None
        lost = [
            rank
            for rank, known in enumerate(control.gather_objects(self._generators.draw(best)))
            if not known
        ]
        words = f"goes on after step {best} with what rank {source} had in memory"
        unknown = f"; the random generators of rank {lost} begin anew" if lost else ""
        return found, words + unknown

    def _hand_on(self) -> Heir:
        """What this rank carries over, whose engine is given up."""
        engine, steps = self._engine, self._engine.steps_done
        engine.give_up()
        if self._generators.kept <= steps:  # the step is over for its generators, if it was for another rank
            self._generators.keep(steps + 1)
        heir = Heir() if engine.learner.updating == steps else self._heir()
        _release(engine)
        return heir

    def _heir(self) -> Heir:
        engine, steps = self._engine, self._engine.steps_done
        engine.learner.undo(steps)
        with suppress(RankError, RuntimeError):
            engine.ledger.settle_before(steps)
            engine.tell()
        told = [record for record in self._recent.steps if record.step < steps]
        if lost := engine.ledger.lost_before(steps):
            told.append(lost.record())
        return Heir(steps, engine.state.own(), tuple(told))


def _called(stay: Stay, error: Exception) -> Start | None:
    """The start that this rank is called to. The loss of another is felt before the agent says what becomes of it."""
    if asked() is not None or isinstance(error, InterruptedRunError):
        return None
    return stay.called(NEWS_SECONDS if is_communication_error(error) else 0.0)


def succession(engine: Engine) -> Succession | None:
    """None where all start again together: another launcher, several machines, a GPU, a state that is divided."""
    session, learner = engine.session, engine.learner
    launcher = os.environ.get(RUN_DIR) if engine.config.recover == "memory" else None
    whole = learner.synchronizer.holds_all and learner.data.degree == session.world_size
    here = session.device.type == "cpu" and session.environment.local_world_size == session.world_size
    allowed = ALLOWED in os.environ and launcher is not None
    return Succession(engine, Path(launcher)) if launcher and allowed and whole and here else None


def succeeds() -> bool:
    """Whether this process takes part in a start in which other ranks stayed."""
    launcher = os.environ.get(RUN_DIR)
    return launcher is not None and is_successor(Path(launcher))


def made_anew(make: Callable[[], nn.Module]) -> nn.Module:
    """A model for another start on a rank that stayed.

    Raises:
        RankError: If ``make`` gives the module of the start before, whose weights are gone and whose hooks are not.
    """
    model = make()
    if any(hasattr(parameter, _GIVEN_UP) for parameter in model.parameters()):
        raise RankError(
            "Task.model returned a module that this process has trained before, and cannot be made anew: all ranks "
            "have to start again. Make the module in the function"
        )
    return model


def _release(engine: Engine) -> None:
    """What lies in a grave needs no room for weights and data."""
    engine.state.saver.give_up()
    engine.learner.optimizer.state.clear()
    for parameter in engine.model.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        setattr(parameter, _GIVEN_UP, True)
    for name in ("task", "state", "feed"):
        vars(engine).pop(name)
    bury(engine, engine.learner.give_up())
