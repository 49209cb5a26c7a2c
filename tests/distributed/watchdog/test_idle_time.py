from __future__ import annotations

import subprocess
import sys
import time

import psutil

from evener.distributed.processes import children_cpu_seconds
from evener.distributed.watchdog.idle_time import Activity


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_mark_is_progress_and_computing_is_none_within_a_phase() -> None:
    now = Activity()
    now.update(1, 1.0)
    busy(0.2)
    now.update(1, 1.0)
    assert now.idle_seconds(in_phase=True) >= 0.2
    assert now.idle_seconds(in_phase=False) < 0.2
    now.update(2, 1.0)
    assert now.idle_seconds(in_phase=True) < 0.2


def test_a_blocked_program_is_idle() -> None:
    now = Activity()
    now.update(0, 1.0)
    for _ in range(3):
        time.sleep(0.2)
        now.update(0, 1.0)
    assert now.idle_seconds(in_phase=False) >= 0.6


def test_a_debugger_is_progress() -> None:
    now = Activity()
    now.update(0, 1.0)
    time.sleep(0.2)
    now.update(0, 1.0, debugs=True)
    assert now.idle_seconds(in_phase=True) < 0.2


def test_nothing_is_known_of_the_time_in_which_nobody_looked() -> None:
    now = Activity()
    now.update(0, 1.0)
    now._looked -= 10
    now._marked -= 10
    now._computed -= 10
    now.update(0, 1.0)
    assert now.idle_seconds(in_phase=True) < 5


def test_processes_of_ones_own_compute_for_it() -> None:
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = children_cpu_seconds(psutil.Process())
        deadline = time.monotonic() + 20
        while children_cpu_seconds(psutil.Process()) < before + 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        program.kill()
        program.wait()
