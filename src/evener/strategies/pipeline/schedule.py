"""Pipeline schedules as data: the order in which each rank runs forward and backward of a stage for a micro-batch.

Three stages on three ranks, four micro-batches, ``F`` forward and ``B`` backward, each of one unit of time::

    gpipe     0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3         all forward, then all backward (Huang et al., 2019)
              1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
              2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    1f1b      0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3         as soon as it can be, one backward for each forward: as
              1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .          many are under way as there are stages behind, not all
              2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .          (Narayanan et al., "PipeDream", 2019)

``interleaved`` (Narayanan et al., 2021) gives each rank several stages, rank r the stages r, r + n, r + 2n, ..., so
that it waits less for the first micro-batch. ``zero-bubble`` (Qi et al., 2024; their ZB-1P) divides backward into the
gradient of the inputs (``I``), for which the stage before waits, and that of the weights (``W``), which fills gaps.
Both orders come from ``torch.distributed.pipelining``. Its import loads torch's compiler and takes a second, so it is
imported only when one of them is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from evener.errors import ConfigurationError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class Action(NamedTuple):
    """One action of a rank: a forward or backward pass of a stage for a micro-batch."""

    kind: str
    """``F`` forward, ``B`` full backward, ``I`` backward of the inputs, ``W`` backward of the weights."""
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}"


Order = tuple[tuple[Action, ...], ...]
"""For each rank, its actions in order."""


@lru_cache(maxsize=64)
def order_of(schedule: str, ranks: int, stages: int, micros: int) -> Order:
    """Returns the actions of each of ``ranks``; stage ``s`` is on rank ``s % ranks``.

    Raises:
        ConfigurationError: If there is no such schedule, or it does not allow so many stages per rank.
    """
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    if schedule in ("gpipe", "1f1b") and stages != ranks:
        raise ConfigurationError(
            f"schedule {schedule!r} has one stage a rank, not {stages} for {ranks} ranks: use 'interleaved' or "
            "'zero-bubble'"
        )
    if schedule == "gpipe":
        return tuple(_gpipe(stage, micros) for stage in range(stages))
    if schedule == "1f1b":
        return tuple(_one_each(stage, stages - stage, micros) for stage in range(stages))
    return _of_torch(_OF_TORCH[schedule], ranks, stages, micros)


def _gpipe(stage: int, micros: int) -> tuple[Action, ...]:
    return tuple(Action(kind, stage, micro) for kind in (FORWARD, BACKWARD) for micro in range(micros))


def _one_each(stage: int, behind: int, micros: int) -> tuple[Action, ...]:
    ahead = min(behind, micros)
    found = [Action(FORWARD, stage, micro) for micro in range(ahead)]
    for micro in range(micros):
        found.append(Action(BACKWARD, stage, micro))
        if micro + ahead < micros:
            found.append(Action(FORWARD, stage, micro + ahead))
    return tuple(found)


_OF_TORCH = {"interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}


def _of_torch(name: str, ranks: int, stages: int, micros: int) -> Order:
    """Takes the order from torch, which wants a multiple of its rounds. Surplus micro-batches are planned and then left
    out, which keeps the order valid."""
    rounds = max(1, micros // ranks)
    planned = -(-micros // rounds) * rounds
    while planned % max(1, planned // ranks):
        planned += 1
    own = [
        SimpleNamespace(
            **{
                "group_size": ranks,
                "group_rank": 0,
                "num_stages": stages,
                "stage_index": stage,
                "submod": None,
            },
            **{"is_first": stage == 0, "is_last": stage == stages - 1, "has_backward": True},
        )
        for stage in range(0, stages, ranks)
    ]
    kind: Any = getattr(importlib.import_module("torch.distributed.pipelining"), name)
    planned_order = kind(own, planned).pipeline_order
    return tuple(
        tuple(
            Action(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in planned_order[rank]
            if action is not None and action.microbatch_index < micros
        )
        for rank in range(ranks)
    )


# Times


class TimedAction(NamedTuple):
    """An action with its times, in seconds from the beginning of the step."""

    action: Action
    began: float
    ended: float


Timeline = tuple[tuple[TimedAction, ...], ...]
"""For each rank, its timed actions in order."""
Cost = Callable[[Action], float]


def simulate(order: Order, cost: Cost, message: float = 0.0) -> Timeline:
    """Predicts when each action runs: it takes ``cost`` seconds and begins as soon as its rank is free and its input is
    there.

    Args:
        message: Seconds that a message between ranks takes.

    Raises:
        ConfigurationError: If the ranks would wait for each other forever.
    """
    stages = 1 + max((action.stage for actions in order for action in actions), default=0)
    ended: dict[Action, tuple[float, int]] = {}
    found: list[list[TimedAction]] = [[] for _ in order]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while len(found[rank]) < len(actions):
                action = actions[len(found[rank])]
                needed = needs(action, stages)
                if needed is not None and needed not in ended:
                    break
                began = found[rank][-1].ended if found[rank] else 0.0
                if needed is not None:
                    came, source = ended[needed]
                    began = max(began, came + (message if source != rank else 0.0))
                found[rank].append(TimedAction(action, began, began + cost(action)))
                ended[action] = ended[action._replace(kind=_done(action))] = found[rank][-1].ended, rank
                moved = True
    if any(len(done) < len(actions) for done, actions in zip(found, order, strict=True)):
        raise ConfigurationError("in this order the ranks wait for each other for ever")
    return tuple(map(tuple, found))


def needs(action: Action, stages: int) -> Action | None:
    """Returns the action of another stage whose result this one needs, or None. ``I`` also stands for ``B``."""
    if action.kind == FORWARD:
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.kind == WEIGHT or action.stage == stages - 1:
        return None
    return Action(INPUT, action.stage + 1, action.micro)


def _done(action: Action) -> str:
    return INPUT if action.kind == BACKWARD else action.kind


def length(timeline: Timeline) -> float:
    """Returns the duration of the step in seconds."""
    return max((timed.ended for actions in timeline for timed in actions), default=0.0)


def bubble(timeline: Timeline) -> float:
    """Returns the fraction of the ranks' time in which they are idle: 0 if none waits."""
    whole = length(timeline) * len(timeline)
    busy = sum(timed.ended - timed.began for actions in timeline for timed in actions)
    return 1.0 - busy / whole if whole else 0.0


def sent(order: Order, source: int, target: int) -> list[Action]:
    """Returns the actions of rank ``source`` whose results go to rank ``target``, in the order of ``source``."""
    ranks, stages = len(order), 1 + max(action.stage for actions in order for action in actions)

    def to(action: Action) -> int | None:
        if action.kind == FORWARD and action.stage < stages - 1:
            return (action.stage + 1) % ranks
        if action.kind in (BACKWARD, INPUT) and action.stage:
            return (action.stage - 1) % ranks
        return None

    return [action for action in order[source] if to(action) == target and source != target]


@dataclass(frozen=True)
class RankSchedule:
    """A schedule as one rank sees it."""

    order: Order
    index: int
    """Index of this rank."""
    expected: tuple[tuple[Action, ...], ...]
    """For each rank, the actions whose results it sends here, in that order."""

    @property
    def own_actions(self) -> tuple[Action, ...]:
        """Actions of this rank."""
        return self.order[self.index]

    @cached_property
    def backward(self) -> str:
        """Kind of action that sends a gradient back: ``I`` if backward is divided, else ``B``."""
        return INPUT if any(action.kind == INPUT for action in self.own_actions) else BACKWARD


@lru_cache(maxsize=64)
def plan_of(schedule: str, ranks: int, stages: int, micros: int, index: int) -> RankSchedule:
    """Returns the schedule for rank ``index``. Raises ConfigurationError as :func:`order_of` does."""
    order = order_of(schedule, ranks, stages, micros)
    return RankSchedule(order, index, tuple(tuple(sent(order, source, index)) for source in range(ranks)))
