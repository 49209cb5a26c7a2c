from __future__ import annotations

import time
from pathlib import Path

import pytest

from evener.hardware.cpu_time import cpu_time


def test_the_times_of_all_threads_are_added(tmp_path: Path) -> None:
    for thread, text in (("7", "1500000000 500000000 3\n"), ("8", "500000000 1000000000 9\n"), ("9", "odd")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert cpu_time(tmp_path) == (2.0, 1.5)


def test_a_system_that_does_not_count_them(tmp_path: Path) -> None:
    assert cpu_time(tmp_path) == (0.0, 0.0)


def test_this_process_computes() -> None:
    before = cpu_time()
    if before == (0.0, 0.0):
        pytest.skip("this system does not count the times of threads")
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    assert 0.04 < cpu_time().busy - before.busy < 10
