"""A rank, or a command, that has done its work and does not end."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from evener.distributed.launch import exit_watch as ends
from evener.distributed.launch.exit_watch import Ends
from evener.distributed.launch.launch import launch
from evener.distributed.launch.script import run_script
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.errors import RankError
from tests.distributed.processes import call
from tests.tiers import NIGHTLY, SLOW, spread

LEFT = Heartbeat(
    rank=1,
    host="here",
    pid=2**22 + 1,
    count=1,
    time=0.0,
    ended=True,
    status=0,
    limit=30.0,
    threads=("uploader",),
)


def test_a_rank_that_stays_is_named_and_ended_at_its_limit() -> None:
    found = Ends()
    assert found.reason_to_end([LEFT], 100.0) is None
    assert found.reason_to_end([LEFT], 129.0) is None
    why = str(found.reason_to_end([LEFT], 130.0))
    assert "rank 1 (host here" in why
    assert "for 30 s: it waits for the thread 'uploader'" in why


def test_a_rank_that_has_ended_is_forgotten() -> None:
    found = Ends()
    assert found.reason_to_end([LEFT], 100.0) is None
    assert found.reason_to_end([], 120.0) is None
    assert found.reason_to_end([LEFT], 140.0) is None


def test_a_thread_of_a_script_may_work_on_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [0.0]
    monkeypatch.setattr(ends, "cpu_seconds", lambda pid: used[0])
    found, script = Ends(), replace(LEFT, works_on=True)
    for second in range(100):
        used[0] = float(second)
        assert found.reason_to_end([script], float(second)) is None
    assert found.reason_to_end([script], 128.0) is None
    assert found.reason_to_end([script], 130.0) is not None


def stays(first: str) -> str:
    """What the function returns is there, but rank 1 does not end."""
    over = threading.Event()
    if os.environ["RANK"] == "1" and first == "thread":
        threading.Thread(target=over.wait, name="uploader").start()
    if os.environ["RANK"] == "1" and first == "atexit":
        atexit.register(over.wait)
    return first


@pytest.mark.parametrize(
    ("what", "named"), spread([("thread", "the thread 'uploader'"), ("atexit", "atexit")], SLOW, NIGHTLY)
)
def test_a_launched_rank_that_does_not_end_is_named_with_its_stack(what: str, named: str) -> None:
    with pytest.raises(RankError, match=named) as raised:
        call(launch, stays, what, processes=2, device="cpu", timeout_seconds=10)
    assert "rank 1 " in str(raised.value)
    assert "threading.py" in str(raised.value)
    assert raised.value.exit_status == 1


@pytest.mark.slow
def test_a_script_s_thread_is_ended_when_it_stands_still(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='endless').start()\n"
    )
    with pytest.raises(RankError, match="'endless'"):
        call(run_script, str(script), processes=2, device="cpu", timeout_seconds=10)


def command_that_stays() -> None:
    threading.Thread(target=time.sleep, args=(1000,), name="endless").start()
    ends.leaving(1.0)


def test_a_command_without_a_launcher_says_what_keeps_it_and_ends() -> None:
    program = "from tests.distributed.launch.test_exit_watch import command_that_stays; command_that_stays()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "it waits for the thread 'endless'" in ended.stderr
    assert ended.stderr.endswith("It is ended for that.\n")
