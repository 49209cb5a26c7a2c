from __future__ import annotations

import os
import signal
import subprocess
import sys

from evener.distributed.processes import find, state_of


def test_a_process_from_its_birth_to_its_burial() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = find(child.pid)
    assert state_of(process) == "running"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert state_of(process) == "stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(process) == "gone"  # a zombie, which nobody has reaped
    assert state_of(find(child.pid)) == "gone"
    child.wait()
    assert state_of(process) == "gone"
    assert find(child.pid) is None
    assert state_of(None) == "gone"


def test_an_id_that_is_used_again_is_another_process() -> None:
    process = find(os.getpid())
    assert state_of(process) == "running"
    vars(process)["_ident"] = (os.getpid(), 1.0)  # born long before the one that has the id now
    assert state_of(process) == "gone"
