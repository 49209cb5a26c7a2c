"""One rank that asks for another number of ranks, agrees, and ends; the others are made up."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.core.config.run_config import RunConfig
from evener.distributed.recovery.regroup import (
    BOUNDS,
    Bounds,
    GroupChange,
    RegroupError,
    Request,
    Stay,
    Stop,
    noted_change,
    tell_newcomers,
)
from evener.distributed.session import RUN_DIR
from evener.distributed.watchdog.store_health import LAUNCHER_PID
from evener.training.lifecycle import regrouping
from evener.training.lifecycle.elastic import joining_terms
from evener.training.lifecycle.handover import keeps_memory
from evener.training.lifecycle.regrouping import Regrouping
from evener.training.reporting.resize import RESIZE, resize_asked


class Team:
    """The session of rank 0, whose control channel answers for the others."""

    def __init__(self, *others: Request) -> None:
        self.rank, self.others, self.said = 0, others, list[str]()
        self.environment = SimpleNamespace(host="a", node=0, local_rank=0)
        self.watchdog = SimpleNamespace(progress=self.said.append)
        self.control = SimpleNamespace(gather_objects=lambda own: [own, *others])


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a launcher shares with its ranks."""
    path = tmp_path / "launcher"
    path.mkdir()
    monkeypatch.setenv(RUN_DIR, str(path))
    monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    monkeypatch.setattr(regrouping, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(regrouping, "_SAME_SECONDS", 0.0)
    return path


def made(run_dir: Path, bounds: Bounds, *others: Request, monkeypatch: pytest.MonkeyPatch) -> Regrouping:
    monkeypatch.setenv(BOUNDS, bounds.to_json())
    team: Any = Team(*others)
    return Regrouping(team, run_dir)


def test_without_a_launcher_that_allows_it_a_signal_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BOUNDS, raising=False)
    team: Any = Team()
    alone = Regrouping(team, tmp_path)
    (tmp_path / RESIZE).write_text("2")
    assert not alone.is_asked()
    assert alone.agree(signal.SIGTERM, 3) == Stop(signal.SIGTERM)


def test_a_program_that_a_rank_has_started_is_no_rank(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER_PID, "1000000000")
    program = made(tmp_path, Bounds((3, 2, 1)), monkeypatch=monkeypatch)
    (tmp_path / RESIZE).write_text("2")
    assert not program.is_asked()


def test_a_request_in_the_run_directory_is_answered(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = made(tmp_path, Bounds((3, 2, 1)), Request("a"), monkeypatch=monkeypatch)
    assert not rank.is_asked()
    (tmp_path / RESIZE).write_text("3")
    assert rank.is_asked()
    change = rank.agree(0, 3)
    assert isinstance(change, GroupChange)
    assert (change.ranks, change.leave) == (3, ())
    assert not resize_asked(tmp_path)
    (tmp_path / RESIZE).write_text("2")
    assert isinstance(rank.agree(0, 3), Stay)
    assert not resize_asked(tmp_path), "also what is refused is answered, and not asked again"


def test_machines_that_wait_are_a_reason(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = made(tmp_path, Bounds(least_machines=1), Request("b", 1), monkeypatch=monkeypatch)
    (tmp_path / RESIZE).write_text("3")
    assert not rank.is_asked(), "machines are not asked"
    tell_newcomers(launcher, ["c"])
    assert rank.is_asked()
    assert rank.agree(0, 3) == GroupChange(words="c comes")


def test_a_rank_ends_with_a_note_for_its_launcher(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for leave, in_memory, stays in (((), False, False), ((), True, True), ((0,), True, False)):
        rank = made(tmp_path, Bounds((3, 2, 1)), monkeypatch=monkeypatch)
        change = GroupChange(leave, 2, words="one leaves", in_memory=in_memory)
        with pytest.raises(RegroupError, match="one leaves") as ended:
            rank.end(change, 5)
        assert ended.value.stays == stays
        assert noted_change(launcher, 0, 1) == change


@pytest.mark.parametrize(
    ("settings", "ranks", "then", "keeps"),
    [
        ({}, 1, 3, True),
        ({}, 3, 1, True),
        ({"strategy": "ddp"}, 3, 2, True),
        ({"strategy": "sharded"}, 3, 2, False),
        ({"strategy": "sharded"}, 1, 2, False),
        ({"strategy": "asynchronous"}, 3, 2, False),
    ],
)
def test_memory_is_kept_where_each_rank_holds_all(
    settings: dict[str, Any], ranks: int, then: int, keeps: bool
) -> None:
    assert keeps_memory(RunConfig(**settings), ranks, then) == keeps


def test_machines_agree_on_all_but_what_is_their_own() -> None:
    own = RunConfig(processes=2, run_dir="here", device="cpu", notice_command="true")
    assert joining_terms("digits", RunConfig(), None) == joining_terms("digits", own, {})
    others = (
        joining_terms("mnist", RunConfig(), None),
        joining_terms("digits", RunConfig(batch_size=3), None),
        joining_terms("digits", RunConfig(), {"width": 3}),
    )
    assert all(other != joining_terms("digits", RunConfig(), None) for other in others)
