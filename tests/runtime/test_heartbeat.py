from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evener.runtime.heartbeat import Heartbeat, MainThread, Sample, process_state


@contextmanager
def looking(main: MainThread, samples: list[Sample], release: Callable[[], None]) -> Iterator[None]:
    """Looks at the main thread a few times from another one while the block runs, then releases it."""

    def look() -> None:
        for _ in range(6):
            time.sleep(0.05)
            samples.append(main.look())
        release()

    thread = threading.Thread(target=look)
    thread.start()
    yield
    thread.join()


def test_a_heartbeat_survives_the_wire() -> None:
    beat = Heartbeat(1, "host", 2, 3, 4.0, "forward", 5, True, 6.0, ("a.py:1 in f", "b.py:2 in g"), "x", True)
    assert Heartbeat.from_json(beat.to_json()) == beat


def test_a_place_in_words() -> None:
    beat = Heartbeat(1, "host", 2, 3, 4.0, "forward", 5, where=("a.py:1 in f", "b.py:2 in g"))
    assert beat.place == "forward of step 5, at a.py:1 in f < b.py:2 in g"
    assert Heartbeat(1, "host", 2, 3, 4.0).place == "its program"


def test_a_blocked_main_thread_is_still_and_its_code_is_named() -> None:
    gate = threading.Event()
    samples: list[Sample] = []
    with looking(MainThread(), samples, gate.set):
        gate.wait()
    assert samples[-1].still_seconds >= 0.1
    assert samples[-1].call is None
    assert "in test_a_blocked_main_thread_is_still_and_its_code_is_named" in samples[-1].where[0]


def test_a_main_thread_that_computes_is_not_still() -> None:
    done = threading.Event()
    samples: list[Sample] = []
    with looking(MainThread(), samples, done.set):
        while not done.is_set():
            pass
    assert min(sample.still_seconds for sample in samples) == 0


def test_states_of_processes() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert process_state(process.pid) == "running"
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert process_state(process.pid) == "stopped"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid) == "gone"
    process.wait()
    assert process_state(process.pid) == "gone"
