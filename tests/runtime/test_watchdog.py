from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from evener.errors import ConfigurationError, RankError, RankTimeoutError
from evener.runtime.heartbeat import Heartbeat
from evener.runtime.session import Session
from evener.runtime.watchdog import Watchdog


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
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(RankTimeoutError, match="5000ms"), watchdog.explained():
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")


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
