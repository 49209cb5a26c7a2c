from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import HashStore, Store

from evener.core.phase_marks import marked, process_watchdogs
from evener.distributed.session import Session
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peers import absent
from evener.distributed.watchdog.store_timeout import LimitedStore
from evener.distributed.watchdog.watchdog import BACKSTOP_SECONDS, Phase, Watchdog, backstop
from evener.errors import ConfigurationError, RankError, RankTimeoutError
from tests.cpp_errors import throw


@pytest.fixture
def watchdog(tmp_path: Path) -> Watchdog:
    return Watchdog(0, 1, HashStore(), timeout_seconds=0.1, run_dir=tmp_path)


def report_from_different_places() -> str:
    with Session(device="cpu", timeout_seconds=30) as session:
        if session.rank == 1:
            with session.watchdog.phase("forward", step=41):
                session.watchdog._publish(session.watchdog._beat())
                session.control.barrier()
                session.control.barrier()
                return ""
        session.control.barrier()
        with session.watchdog.wait("all-reduce", step=41):
            report = session.watchdog.report()
        session.control.barrier()
        return report


def test_a_report_says_where_every_rank_stands(ranks: Any) -> None:
    report, _ = ranks(2).run(report_from_different_places)
    first, second = report.splitlines()
    assert "rank 1 (host" in first
    assert "is in forward of step 41, at test_watchdog.py" in first
    assert "rank 0 (host" in second
    assert "waits in all-reduce of step 41" in second


def test_phases_nest_and_end(watchdog: Watchdog) -> None:
    places = []
    with watchdog.phase("training", step=3):
        with watchdog.wait("all-reduce", step=4):
            places.append(watchdog._beat())
        with watchdog.wait("exchange"):
            places.append(watchdog._beat())
        places.append(watchdog._beat())
    places.append(watchdog._beat())
    assert [(p.phase, p.step, p.waits) for p in places] == [
        ("all-reduce", 4, True),
        ("exchange", 3, True),
        ("training", 3, False),
        (None, None, False),
    ]


def test_a_phase_ends_with_its_exception(watchdog: Watchdog) -> None:
    with pytest.raises(KeyError), watchdog.wait("all-reduce"):
        raise KeyError("mine")
    assert watchdog._beat().phase is None


def test_communication_errors_leave_a_wait_explained(watchdog: Watchdog) -> None:
    with pytest.raises(RankError, match="rank 0 lost other ranks in barrier"), watchdog.wait("barrier"):
        throw(RuntimeError("Connection closed by peer"))
    with pytest.raises(RankTimeoutError, match="5000ms"), watchdog.explained():
        throw(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))


def test_honest_work_lets_errors_through(watchdog: Watchdog) -> None:
    with pytest.raises(RuntimeError, match="shapes"), watchdog.wait("all-reduce"):
        raise RuntimeError("shapes cannot be multiplied")
    error = ConfigurationError("mine")
    assert watchdog.explain(error) is error


def test_the_launcher_finds_progress_and_the_end(watchdog: Watchdog, tmp_path: Path) -> None:
    watchdog.start()
    assert not Heartbeat.from_json((tmp_path / "beat-0").read_text()).ended
    watchdog.progress("step 41 of 400")
    watchdog.close()
    last = Heartbeat.from_json((tmp_path / "beat-0").read_text())
    assert (last.progress, last.ended) == ("step 41 of 400", True)


def test_all_that_happens_in_what_is_done_together_belongs_to_it(watchdog: Watchdog) -> None:
    with watchdog.phase("training", step=3), watchdog.together("checkpoint"):
        writing = watchdog._beat()
        with watchdog.wait("barrier"):
            waiting = watchdog._beat()
    assert (writing.place.split(",")[0], writing.together, writing.waits) == (
        "checkpoint of step 3",
        "checkpoint of step 3",
        False,
    )
    assert (waiting.phase, waiting.together, waiting.waits) == ("barrier", "checkpoint of step 3", True)
    assert watchdog._beat().together == ""


class Ledger:
    """A store in memory that counts what it is asked; ``fail`` is called before each answer."""

    def __init__(self, fail: Callable[[], None] = lambda: None) -> None:
        self.values: dict[str, str] = {}
        self.requests, self.read = 0, 0
        self._fail = fail

    def _count(self, values: int) -> None:
        self._fail()
        self.requests += 1
        self.read += values

    def set(self, key: str, value: str) -> None:
        self._count(0)
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self._count(1)
        return self.values[key].encode()

    def check(self, keys: Sequence[str]) -> bool:
        self._count(0)
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._count(len(keys))
        return [self.values[key].encode() for key in keys]


def hanging(world_size: int, store: Ledger, seconds: float) -> list[Watchdog]:
    """Ranks of which all but the last have waited for ``seconds`` of 10 for the last, which is at work."""
    ranks = []
    for rank in range(world_size):
        watchdog = Watchdog(rank, world_size, HashStore(), timeout_seconds=10)
        watchdog._roster.store, watchdog._host = cast(LimitedStore, store), f"host{rank}"
        name, waits = ("forward", False) if rank == world_size - 1 else ("all-reduce", True)
        watchdog.phase(name, 41, waits=waits).__enter__()
        watchdog.place = watchdog.place._replace(since=time.monotonic() - seconds)
        ranks.append(watchdog)
    return ranks


def requests_of_a_hang(world_size: int, ticks: int = 6) -> tuple[int, int]:
    """What the store is asked, and the values that it reads out, while the ranks wait but not yet for too long."""
    store = Ledger()
    ranks = hanging(world_size, store, 5)
    for _ in range(ticks):
        for watchdog in ranks:
            watchdog._tick()
    return store.requests, store.read


def test_a_hang_of_twice_as_many_ranks_costs_the_store_twice_as_much() -> None:
    (few, few_read), (many, many_read) = requests_of_a_hang(32), requests_of_a_hang(64)
    assert many < 2.5 * few
    assert many_read < 2.5 * few_read


def test_the_rank_that_looks_speaks_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = hanging(5, Ledger(), 8)
    spoke: list[int] = []
    monkeypatch.setattr(Watchdog, "_end_process", lambda self, *_: spoke.append(self.rank))
    for watchdog in reversed(ranks):
        watchdog._tick()
    for watchdog in ranks:
        watchdog.place = watchdog.place._replace(since=watchdog.place.since - 3)
    for watchdog in ranks:
        watchdog._tick()
    assert spoke == [0]
    assert "rank 4" in ranks[0].report().splitlines()[0]


def test_the_next_rank_looks_when_the_looker_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is stopped: rank 1 finds that out, waits for the lowest to speak no longer, and names it."""
    ranks = hanging(4, Ledger(), 9)
    spoke: list[int] = []
    monkeypatch.setattr(Watchdog, "_end_process", lambda self, *_: spoke.append(self.rank))
    for watchdog in ranks:
        watchdog._tick()
    for watchdog in ranks[1:]:
        watchdog._roster.looker._since -= 4
        watchdog.place = watchdog.place._replace(since=watchdog.place.since - 2)
        watchdog._tick()
    assert spoke == []
    for watchdog in ranks[1:]:
        watchdog._roster.standings[0]._since -= 4
        watchdog._tick()
    assert spoke == [1]


def test_a_rank_that_came_late_once_is_not_missing_from_the_next_block_of_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each fold of a cross-validation saves step 6, and what was seen in the first says nothing of the second."""
    first, second = (Watchdog(rank, 2, HashStore(), timeout_seconds=10) for rank in range(2))
    store, said = Ledger(), list[str]()
    monkeypatch.setattr(Watchdog, "_end_process", lambda self, message, *_: said.append(message))
    for watchdog in (first, second):
        watchdog._roster.store, watchdog._host = cast(LimitedStore, store), "host"
    (other,) = first._roster.others
    second._tick()
    with first.together("checkpoint", step=6):
        first._tick()
    assert other._apart_since is not None
    other._apart_since -= 500
    first._tick()
    second._tick()
    with first.together("checkpoint", step=6):
        first._tick()
    assert said == []


def goes_on_after(troubles: list[Exception], connects: bool = True) -> None:
    """Raises each of the troubles in the watchdog's thread, the last first, and waits for the heartbeat after them."""

    def fail() -> None:
        if troubles:
            raise troubles.pop()

    def connect() -> Store:
        assert connects, "there is nothing to connect to anew"
        return cast(Store, store)

    store = Ledger(fail)
    watchdog = Watchdog(0, 2, HashStore(), timeout_seconds=0.1)
    watchdog._roster._clone = connect  # type: ignore[method-assign]
    watchdog._roster.store = cast(LimitedStore, store)
    watchdog._thread.start()
    deadline = time.monotonic() + 20
    while "0" not in store.values and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not troubles
    assert Heartbeat.from_json(store.values["0"]).rank == 0
    watchdog.close()


def test_the_watchdog_goes_on_after_errors_of_the_store_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    goes_on_after([RuntimeError("Broken pipe"), OSError("reset")])
    assert capfd.readouterr().err == ""


def test_an_error_of_the_watchdogs_own_is_shown_once_and_is_not_the_stores(
    capfd: pytest.CaptureFixture[str],
) -> None:
    goes_on_after([KeyError("twice"), KeyError("once"), ValueError("half a heartbeat")], connects=False)
    words = capfd.readouterr().err
    assert words.startswith("the watchdog of rank 0 failed, and goes on:\nTraceback")
    assert words.endswith("ValueError: half a heartbeat\n")
    assert words.count("Traceback") == 1


def test_an_error_that_a_new_connection_does_not_mend_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    goes_on_after([RuntimeError("dictionary changed size during iteration")] * 4)
    assert capfd.readouterr().err.count("RuntimeError: dictionary changed size") == 1


def test_a_wait_ends_at_the_timeout_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is gone: a rank at work goes on, and one that waits ends its wait."""

    def fail() -> None:
        raise RuntimeError("Broken pipe")

    def refuse() -> Store:
        raise RuntimeError("Connection refused")

    spoke: list[str] = []
    monkeypatch.setattr(Watchdog, "_end_process", lambda self, words, **_: spoke.append(words))
    watchdog = Watchdog(0, 2, HashStore(), timeout_seconds=0.5)
    watchdog._roster.store = cast(LimitedStore, Ledger(fail))
    watchdog._roster._clone = refuse  # type: ignore[method-assign]
    watchdog._thread.start()
    with watchdog.phase("forward"):
        for _ in range(10):
            watchdog.moved()
            time.sleep(0.1)
    assert not spoke
    with watchdog.wait("all-reduce"):
        time.sleep(1.5)
    watchdog.close()
    assert spoke[0].startswith("rank 0 has waited"), spoke
    assert "the store of the run has not answered for" in spoke[0]
    assert "rank 1: has given no sign of life yet" in watchdog.report()


def test_keys_that_nobody_has_set() -> None:
    store = Ledger()
    for rank in range(1000):
        if rank not in (3, 500, 999):
            store.set(str(rank), "x")
    before = store.requests
    assert absent(cast(Store, store), [str(rank) for rank in range(1000)]) == ["3", "500", "999"]
    assert store.requests - before < 100
    assert absent(cast(Store, store), []) == []


def test_a_wait_is_marked_on_the_main_thread_where_there_is_a_watchdog(watchdog: Watchdog) -> None:
    with marked("all-reduce"):
        assert watchdog._beat().phase is None
    assert backstop(7) == 7
    process_watchdogs.append(watchdog)
    try:
        assert backstop(7) == 7 + BACKSTOP_SECONDS
        with watchdog.phase("training", step=3):
            with marked("all-reduce"), marked("of no news"):
                beat = watchdog._beat()
            from_a_thread = in_a_thread(lambda: isinstance(marked("all-reduce"), Phase))
        assert (beat.phase, beat.step, beat.waits) == ("all-reduce", 3, True)
        assert not from_a_thread
    finally:
        process_watchdogs.remove(watchdog)


def in_a_thread(question: Callable[[], bool]) -> bool:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(question).result()
