from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evener.core import stacks
from evener.core.stacks import listen, stack_of, stacks_of, threads_of
from evener.distributed.watchdog import heartbeat, watchdog

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks the kernel through /proc")


@contextmanager
def child(act: Callable[[], object]) -> Iterator[int]:
    """A forked process that listens as this one does, in ``act``."""
    listen()
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    try:
        time.sleep(0.2)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def hold() -> None:
    while True:
        ctypes.PyDLL(None).sleep(1000)


def spin() -> None:
    while True:
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("act", [spin, hold])
def test_a_process_shows_where_it_is_also_with_the_lock(act: Callable[[], None]) -> None:
    with child(act) as pid:
        for _ in range(2):
            frames = stack_of(pid)
            assert "test_stacks.py" in frames[0], frames
            assert frames[0].endswith(f" in {act.__name__}")
            assert any(" in child" in frame for frame in frames)


def call_often() -> None:
    """Frames of the interpreter come and go. The handler that needs no lock is not there."""
    faulthandler.unregister(stacks._NATIVE_SIGNAL)
    while True:
        (lambda: None)()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_who_runs_python_code_is_asked_without_harm() -> None:
    """In the middle of an instruction about one question in 300 would crash it."""
    with child(call_often) as pid:
        for _ in range(1500):
            os.kill(pid, stacks._PYTHON_SIGNAL)
            time.sleep(0.0005)
        assert any(frame.endswith(" in call_often") for frame in stack_of(pid))


def wait_beside_work() -> None:
    """The main thread waits without the lock, another runs."""
    threading.Thread(target=spin, daemon=True).start()
    while True:
        ctypes.CDLL(None).sleep(1000)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_of_who_waits_in_native_code_no_other_thread_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if there were no answer to the first.
    monkeypatch.setattr(stacks, "_PYTHON_SIGNAL", stacks._NATIVE_SIGNAL)
    with child(wait_beside_work) as pid:
        found = threads_of(pid)
        assert " in wait_beside_work" in found
        assert " in spin" not in found


def test_nothing_is_sent_to_who_does_not_listen() -> None:
    program = subprocess.Popen(["sleep", "60"])
    try:
        assert stack_of(program.pid) == []
        time.sleep(0.1)
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()
    assert stack_of(program.pid) == []
    assert stacks_of(2**22 - 1) == ""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_stopped_process_is_not_waited_for() -> None:
    with child(spin) as pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        began = time.monotonic()
        assert stack_of(pid) == []
        assert time.monotonic() - began < 1


def test_of_a_deep_stack_the_innermost_frames_are_shown() -> None:
    lines = stacks._lines([f'File "a.py", line {n} in f' for n in range(40)], "  ").splitlines()
    assert lines[0] == '  File "a.py", line 0 in f'
    assert len(lines) == 13
    assert lines[-1] == "  ... and 28 more frames"


def test_the_main_thread_is_the_oldest() -> None:
    answer = 'Current thread 0x2 (most recent call first):\n  File "b.py", line 2 in g\n\n'
    answer += 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n  File "a.py", line 9 in <module>\n'
    assert stacks._main_thread(answer) == ['File "a.py", line 1 in f', 'File "a.py", line 9 in <module>']


LOOP = 'File "torch/utils/data/_utils/worker.py", line 9 in _worker_loop'


def test_a_worker_that_waits_for_work_is_idle() -> None:
    waits = [
        'File "/lib/selectors.py", line 1 in select',
        'File "/lib/multiprocessing/queues.py", line 2 in get',
        LOOP,
    ]
    assert stacks._is_idle(waits)
    assert not stacks._is_idle(['File "/home/data.py", line 3 in __getitem__', *waits[2:]])


def test_threads_of_evener_itself_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [*([watchdog.__file__, heartbeat.__file__] * 2), "/home/me/writer.py", "/home/me/train.py"]
    asked = "\n\n".join(
        f'Thread 0x{number} (most recent call first):\n  File "{file}", line 3 in work'
        for number, file in enumerate(files)
    )
    monkeypatch.setattr("evener.core.stacks._asked", lambda pid: asked)
    told = threads_of(4711)
    assert "writer.py" in told
    assert "train.py" in told
    assert "watchdog.py" not in told
