"""A rank gives its word to stay; either it takes it back, or the agent takes it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from evener.distributed.recovery import deferred_free as grave
from evener.distributed.recovery.replacement import (
    RecalledError,
    Start,
    SurvivorLease,
    announce,
    announced,
    check_recall,
    is_successor,
    may_be_recalled,
    say_ready,
    take_at_their_word,
)
from evener.distributed.restart_count import advance_to, generation, next_name

NEXT = Start(1, (2,), ())


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")


def test_names_are_counted_in_each_start() -> None:
    first = [next_name("tests"), next_name("tests"), next_name("others")]
    advance_to(1)
    assert first == ["tests/0/0", "tests/0/1", "others/0/0"]
    assert generation() == 1
    assert next_name("tests") == "tests/1/0"


def test_what_is_buried_stays_for_one_more_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grave, "_graves", {})
    grave.bury("first", "of it")
    advance_to(1)
    grave.bury("second")
    assert grave._graves == {0: ["first", "of it"], 1: ["second"]}
    advance_to(2)
    grave.bury("third")
    assert grave._graves == {1: ["second"], 2: ["third"]}


def test_ranks_stay_when_all_have_given_their_word(tmp_path: Path) -> None:
    with SurvivorLease(tmp_path, 0):
        assert may_be_recalled()
        assert not take_at_their_word(tmp_path, [0, 1], 0)
        assert not take_at_their_word(tmp_path, [0], 1), "it is that of another start"
        assert take_at_their_word(tmp_path, [0], 0)
        assert not take_at_their_word(tmp_path, [0], 0)
    assert not take_at_their_word(tmp_path, [], 0)
    assert not may_be_recalled()


def test_a_rank_that_has_left_does_not_stay(tmp_path: Path) -> None:
    with SurvivorLease(tmp_path, 0) as stay:
        stay.leave()
        assert not take_at_their_word(tmp_path, [0], 0)


def test_a_rank_that_was_taken_at_its_word_does_not_leave(tmp_path: Path) -> None:
    called = threading.Event()
    with SurvivorLease(tmp_path, 0, called.set) as stay:
        assert take_at_their_word(tmp_path, [0], 0)
        check_recall()
        announce(tmp_path, NEXT)
        with pytest.raises(RecalledError, match=r"start 1 of the ranks, with \[2\] new") as caught:
            stay.leave()
        assert caught.value.start == NEXT
        assert called.is_set()
        with pytest.raises(RecalledError):
            check_recall()
    check_recall()


def test_a_rank_that_goes_on_is_recalled_when_the_new_rank_is_ready(tmp_path: Path) -> None:
    with SurvivorLease(tmp_path, 0, goes_on=True) as stay:
        announce(tmp_path, NEXT)
        time.sleep(0.3)
        check_recall()
        advance_to(1)
        say_ready(tmp_path)
        advance_to(0)
        limit = time.monotonic() + 5
        while stay.start is None and time.monotonic() < limit:
            time.sleep(0.01)
        with pytest.raises(RecalledError):
            check_recall()


def test_a_rank_that_cannot_go_on_joins_the_start_at_once(tmp_path: Path) -> None:
    told = threading.Event()
    with SurvivorLease(tmp_path, 0, told.set, goes_on=True) as stay:
        announce(tmp_path, NEXT)
        assert stay.called(5.0) == NEXT
        assert told.is_set()


def test_a_start_that_is_over_calls_nobody(tmp_path: Path) -> None:
    assert announced(tmp_path) is None
    announce(tmp_path, NEXT)
    assert not is_successor(tmp_path)
    advance_to(1)
    assert is_successor(tmp_path)
    with SurvivorLease(tmp_path, 0) as stay:
        assert stay.called(0.3) is None
