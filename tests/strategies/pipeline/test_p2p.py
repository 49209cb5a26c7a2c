"""Ranks do not wait for each other for ever where messages wait for those before them, as they do on devices."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from typing import Any

import pytest

from evener.strategies.pipeline.p2p import Inbox, lane_of
from evener.strategies.pipeline.schedule import FORWARD, Action, RankSchedule, needs, plan_of, sent

Lane = Callable[[int, int, int], Any]
Message = tuple[int, int, Action]
"""(sender, receiver, action whose result it is)."""


def in_order(plan: RankSchedule, stages: int) -> Iterator[Message | Action]:
    """What one rank does: its actions, and its messages where it posts them. It waits for each message that it is to
    receive before it goes on."""
    ranks, posted = len(plan.order), list[Message]()

    def begin(source: int, action: Action) -> Callable[[], None]:
        return lambda: posted.append((source, plan.index, action))

    inboxes = [
        Inbox(found, partial(begin, source), ahead=False) for source, found in enumerate(plan.expected)
    ]
    for action in plan.own_actions:
        needed = needs(action, stages)
        if needed is not None and needed.stage % ranks != plan.index:
            kind = FORWARD if action.kind == FORWARD else plan.backward
            inboxes[needed.stage % ranks].receive(needed._replace(kind=kind))
            yield from posted
            posted.clear()
        yield action
        for target in range(ranks):
            if action in sent(plan.order, plan.index, target):
                yield plan.index, target, action


def ends(schedule: str, ranks: int, per_rank: int, micros: int, lane: Lane) -> bool:
    """True if a step ends where every message waits for its other side, and for those before it in its lane."""
    stages = ranks * per_rank
    todo = [deque(in_order(plan_of(schedule, ranks, stages, micros, rank), stages)) for rank in range(ranks)]
    queues: defaultdict[Any, deque[Message]] = defaultdict(deque)
    awaited: list[Message | None] = [None] * ranks
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while todo[rank] and awaited[rank] is None:
                moved, following = True, todo[rank].popleft()
                if isinstance(following, Action):
                    continue
                queues[rank, lane(*following[:2], ranks)].append(following)
                awaited[rank] = following if following[1] == rank else None
        for source, target in permutations(range(ranks), 2):
            own, other = (queues[rank, lane(source, target, ranks)] for rank in (source, target))
            if own and other and own[0] == other[0]:
                moved, awaited[target] = True, None
                own.popleft()
                other.popleft()
    return not any(todo) and not any(queues.values())


@pytest.mark.parametrize("micros", [1, 4, 9, 16])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
    ],
)
def test_no_message_waits_for_ever(schedule: str, per_rank: int, ranks: int, micros: int) -> None:
    assert ends(schedule, ranks, per_rank, micros, lane_of)


def test_a_lane_for_each_direction_would_not_be_enough() -> None:
    assert not ends("zero-bubble", 3, 2, 8, lambda source, target, ranks: target > source)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_rank_has_two_kinds_of_messages_in_a_lane(ranks: int) -> None:
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    for rank in range(ranks):
        ways = {way for pair in ring for way in (pair, pair[::-1]) if rank in way}
        assert len({lane_of(*way, ranks) for way in ways}) == len(ways)
