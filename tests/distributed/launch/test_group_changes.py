"""What a launcher makes of what its ranks have noted, and of failures after machines have come."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.distributed.failure import Failure, failure_of
from evener.distributed.launch.group_changes import GroupChanges
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.loopback import OneMachine
from evener.distributed.recovery.regroup import BOUNDS, LAUNCH, Bounds, GroupChange, note_change, note_stop
from evener.distributed.recovery.replacement import NothingKeptError

OWN, LOST, ASKED = (Failure(0, kind, "") for kind in ("killed", "communication", "interrupted"))


def changes(run_dir: Path, *counts: int, **members: Any) -> GroupChanges:
    found = GroupChanges(OneMachine(5), Rendezvous(), Headcount(counts), run_dir, False, "")
    if members:
        found._members = SimpleNamespace(prove=lambda: None, **members)  # type: ignore[assignment]
    return found


def test_ranks_are_told_what_the_run_may_become_only_if_that_is_more_than_one(tmp_path: Path) -> None:
    assert changes(tmp_path, 3).variables() == {BOUNDS: "", LAUNCH: ""}, (
        "also in a run that a rank has started"
    )
    assert changes(tmp_path, 3, 2).variables()[BOUNDS] == Bounds((3, 2)).to_json()


def test_each_change_is_another_start(tmp_path: Path) -> None:
    found = changes(tmp_path, 3, 2)
    assert found.start_number(1) == 1
    note_change(tmp_path, 1, 0, GroupChange(ranks=2))
    note_change(tmp_path, 1, 1, GroupChange(ranks=2))
    assert found.noted(1, 2, 0) == GroupChange(ranks=2)
    assert (found.start_number(1), found.has_left) == (2, False)
    kept = GroupChange(ranks=3, in_memory=True)
    note_change(tmp_path, 2, 0, kept)
    assert found.kept(1, 1) is None, "of the start before"
    assert found.kept(2, 1) == kept
    found.made()
    assert found.start_number(1) == 3


def test_a_machine_whose_ranks_leave_has_left(tmp_path: Path) -> None:
    note_change(tmp_path, 4, 0, GroupChange(leave=(2,)))
    for own, has_left in ((1, False), (2, True)):
        found = changes(tmp_path, 1, round=4)
        found._bounds = SimpleNamespace()  # type: ignore[assignment]
        assert found.noted(found.start_number(9), 1, own) is not None
        assert found.has_left == has_left


@pytest.mark.parametrize(
    ("cause", "hopeless", "progressed", "grown", "judged"),
    [
        (LOST, False, True, False, (False, True)),
        (LOST, False, False, False, (False, False)),
        (OWN, False, True, False, (False, False)),
        (OWN, True, True, True, (True, False)),
        (OWN, True, False, True, (False, True)),
        (LOST, False, False, True, (False, True)),
    ],
)
def test_those_that_have_just_come_may_be_the_reason_of_a_failure(
    cause: Failure, hopeless: bool, progressed: bool, grown: bool, judged: tuple[bool, bool], tmp_path: Path
) -> None:
    found = changes(tmp_path, 1, has_grown=grown, round=1)
    assert found.judged(1, cause, hopeless, progressed) == judged
    assert found.may_have_lost == grown


def test_a_death_that_has_counted_when_a_rank_was_replaced_counts_once(tmp_path: Path) -> None:
    found = changes(tmp_path, 2)
    assert found.judged(1, failure_of(NothingKeptError("nothing"), 0), False, True) == (False, True)
    assert found.start_number(0) == 1


def test_ranks_that_have_saved_and_ended_are_not_started_again(tmp_path: Path) -> None:
    for found in (changes(tmp_path, 3, 2), changes(tmp_path, 1, has_grown=False, round=2)):
        assert not found.judged(2, ASKED, False, False)[0]
    note_stop(tmp_path, 2)
    for found in (changes(tmp_path, 3, 2), changes(tmp_path, 1, has_grown=True, round=2)):
        assert found.judged(2, ASKED, False, False) == (True, False)
        assert not found.judged(2, OWN, False, False)[0]


@pytest.mark.parametrize(
    ("has_left", "is_new", "ended", "leaves"),
    [
        (True, False, True, True),
        (False, True, True, True),
        (False, False, False, True),
        (False, False, True, False),
    ],
)
def test_a_launcher_closes_the_rendezvous_only_at_the_end_of_the_run(
    has_left: bool, is_new: bool, ended: bool, leaves: bool, tmp_path: Path
) -> None:
    done: list[str] = []
    found = changes(tmp_path, 1, is_new=is_new, leave=lambda: done.append("left"))
    found._handler = SimpleNamespace(shutdown=lambda: done.append("closed"))  # type: ignore[assignment]
    found.has_left = has_left
    found.part(ended)
    assert done == ["left" if leaves else "closed"]
