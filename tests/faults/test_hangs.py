"""Hangs: each ends within the timeout and ten seconds, with who waits, who does not come, and where that one is."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.distributed.processes import Ended, end, start_command, start_script
from tests.faults.running import Fault, rows, suffer
from tests.faults.tasks_hangs import TIMEOUT_SECONDS
from tests.tiers import NIGHTLY, SLOW, spread

HERE = "tests.faults.tasks_hangs"
WAITS = r"RankTimeoutError: rank 0 has waited \d+ s in .* \(timeout 3 s\)"
STILL = r"RankTimeoutError: no rank has made any progress for \d+ s \(timeout 3 s\)"
AT = r'rank 1 \(host .*\n      File ".*tasks_hangs.py", line \d+ in '


def hang(
    name: str, task: str, *words: str, arguments: tuple[str, ...] = (), beyond: float = 0.0, **parts: object
) -> Fault:
    """Ends within the timeout and ten seconds, and those ``beyond``."""
    settings = ("--epochs", "2", *arguments)
    return Fault(name, f"{HERE}:{task}", 1, words, TIMEOUT_SECONDS + 10 + beyond, settings, **parts)  # type: ignore[arg-type]


ONE = (
    hang("loop in forward", "forward", WAITS, AT + "spin"),
    hang("never joins", "late", WAITS, AT + "drowse"),
    hang("loop in backward", "backward", WAITS, AT + "drowse"),
    hang("loop in the loader", "loader", WAITS, AT + "drowse"),
    hang(
        "loop in a worker",
        "loader",
        WAITS,
        r'its DataLoader worker \(pid \d+\) is at\n        File ".*tasks_hangs.py", line \d+ in drowse',
        arguments=("--workers", "1"),
    ),
    hang(
        "worker stopped",
        "worker_stopped",
        WAITS,
        r"its child \(pid \d+\) is stopped",
        arguments=("--workers", "1"),
    ),
    hang("loop in evaluation", "evaluation", WAITS, AT + "drowse"),
    hang("in a collective of its own", "collective", r"rank 1 .*waits in all_reduce"),
    hang("holds the lock", "locked", WAITS, AT + "hold"),
    hang("stopped", "stopped", WAITS, r"rank 1 .* is stopped \(SIGSTOP"),
)
ALL = (
    hang("all loop in forward", "forward_all", STILL, AT + "spin"),
    # No save comes first, for which rank 0 reads a few samples: the others would wait for it.
    hang("all loop in the loader", "loader_all", STILL, AT + "drowse", arguments=("--save-every", "1h")),
    hang(
        "all loop in a worker",
        "loader_all",
        STILL,
        r"its DataLoader worker \(pid \d+\) is at\n",
        arguments=("--workers", "1"),
    ),
    hang(
        "all hold the lock",
        "locked_all",
        r"no rank of this machine has given a sign of life for \d+ s \(timeout 3 s\)",
        AT + "hold",
    ),
)
LEFT = (
    hang(
        "exit 0",
        "leaves",
        r"rank 1 has left after step 3 of 8, epoch 1 with status 0; but rank 0 waits",
    ),
    hang(
        "gone with status 0",
        "vanishes",
        r"rank 1 is gone.*; but rank 0 waits in",
    ),
)
WORKERS = (
    hang(
        "worker killed",
        "worker_killed",
        r"rank 1.* DataLoader worker \(pid \d+\) was killed by signal SIGKILL.*out of memory",
        arguments=("--workers", "1"),
        never=(),
    ),
)
KEEPER = (
    hang(
        "launcher stopped",
        "goes_on",
        r"RankTimeoutError: the run is left alone: its launcher \(pid \d+\) is stopped",
        arguments=("--epochs", "1000000"),
        signals=((0, signal.SIGSTOP), (TIMEOUT_SECONDS + 6.5, signal.SIGCONT)),
        beyond=TIMEOUT_SECONDS + 6.5,  # for the launcher to say so too, when it goes on
    ),
)


EACH_KIND = (
    "loop in a worker",
    "all loop in forward",
    "all hold the lock",
    "exit 0",
    "worker killed",
    "launcher stopped",
)
"""A rank that loops in a forward pass or is stopped is among the tests of the store and of the launcher."""


@pytest.mark.parametrize("fault", rows(*ONE, *ALL, *LEFT, *WORKERS, *KEEPER, slow=EACH_KIND))
def test_it_ends_as_promised(fault: Fault, tmp_path: Path) -> None:
    suffer(fault, tmp_path)


@pytest.mark.slow
def test_a_rank_alone_that_makes_no_progress_ends(tmp_path: Path) -> None:
    fault = hang(
        "alone", "forward_all", r"RankTimeoutError: this rank, the only one, has not made any progress"
    )
    suffer(fault, tmp_path, processes=1)


# Scripts

LIMIT = """
from evener.distributed.watchdog.watchdog import current_watchdog

def limit():  # for the hang, and not for the start on a busy machine
    current_watchdog().timeout_seconds = 3.0
"""
CALLS = (
    LIMIT
    + """
import sys, torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, mode = dist.get_rank(), sys.argv[1]
for _ in range(3):
    dist.all_reduce(torch.ones(3))
limit()
if mode == "shape":
    dist.all_reduce(torch.ones(3 + 1000 * rank))  # shape
elif mode == "type":
    dist.all_reduce(torch.ones(1000, dtype=(torch.float32, torch.float64)[rank]))  # type
elif mode == "one more" and rank == 0:
    dist.all_reduce(torch.ones(3))
elif mode == "order" and rank == 0:
    dist.all_reduce(torch.ones(3))  # rank 0
    dist.broadcast(torch.ones(3), 0)
elif mode == "order":
    dist.broadcast(torch.ones(3), 0)  # rank 1
    dist.all_reduce(torch.ones(3))
"""
)


def run_script(path: Path, text: str, mode: str) -> tuple[Ended, dict[str, int]]:
    """How two ranks end, and the numbers of the lines that end with a comment."""
    path.write_text(text)
    lines = enumerate(text.splitlines(), 1)
    marked = {line.partition("  # ")[2]: number for number, line in lines if "  # " in line}
    command = ("run", "--processes", "2", "--device", "cpu", path, mode)
    return end(start_command(*command), 150), marked


@pytest.mark.slow
def test_collectives_in_another_order_are_told_apart_by_rank_and_line(tmp_path: Path) -> None:
    ended, lines = run_script(tmp_path / "calls.py", CALLS, "order")
    assert ended.status == 1
    first, second = (f"calls.py:{lines[f'rank {rank}']} in <module>" for rank in (0, 1))
    words = f"rank 0 all_reduce of float32[3], at {first}; rank 1 broadcast of float32[3], at {second} (timeout 3 s)"
    assert f"RankTimeoutError: the ranks call different collectives: {words}" in ended.err


@pytest.mark.parametrize("mode", spread(["shape", "type"], SLOW, NIGHTLY))
def test_another_shape_or_type_is_told_with_its_line(tmp_path: Path, mode: str) -> None:
    """gloo ends the process, and has to be seen from outside."""
    ended, lines = run_script(tmp_path / "calls.py", CALLS, mode)
    assert ended.status == 1
    assert "collective mismatch" in ended.err
    assert re.search(r"rank \d \(pid \d+\) was killed by SIGABRT", ended.err), ended.err
    assert f'calls.py", line {lines[mode]} in <module>' in ended.err


@pytest.mark.slow
def test_one_collective_more_is_told_as_a_rank_that_left(tmp_path: Path) -> None:
    ended, _ = run_script(tmp_path / "calls.py", CALLS, "one more")
    assert ended.status == 1
    assert "rank 1 has left with status 0; but rank 0 is still in its program" in ended.err


LOOP = (
    LIMIT
    + """
import sys
import evener
from evener.distributed.session import Session
from tests.faults.tasks import task

mode = sys.argv[1]

def train():
    with Session(device="cpu") as session:
        session.control.barrier()
        session.timeout_seconds = 3.0
        limit()
        with evener.Engine(task(), session=session, steps=6) as engine:
            for batch in engine.batches():
                engine.step(batch)
                if mode == "break" and session.rank == 0 and engine.steps_done == 4:
                    break
                if mode == "return" and session.rank == 1 and engine.steps_done == 3:
                    return
            if mode == "more" and session.rank == 1:
                engine.step(batch)
            session.control.barrier()

try:
    evener.launch(train, processes=2, device="cpu")
except evener.EvenerError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(1)
"""
)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        pytest.param(
            "return",
            r"rank 1 has left after step 3 of 6, epoch 1.*; but rank 0 waits in .*",
            marks=NIGHTLY,
        ),
        pytest.param(
            "break",
            r"(?s)rank 0 .*waits in barrier.*, after step 4 of 6.*waits in .* of step 4.*, after step 4 of 6",
            marks=SLOW,
        ),
        pytest.param(
            "more",
            r"(?s)(?=.*rank 0 \([^\n]*waits in barrier)(?=.*rank 1 \([^\n]*waits in [^\n]* of step 6, at loop.py)",
            marks=NIGHTLY,
        ),
    ],
    ids=["return", "break", "more"],
)
def test_a_loop_that_ranks_leave_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    ended = end(start_script(script, mode), 150)
    assert ended.status == 1, ended.err
    assert re.search(words, ended.err), ended.err


@pytest.mark.parametrize("backend", spread(["c10d", "static"], SLOW, NIGHTLY))
def test_a_machine_that_never_comes(backend: str) -> None:
    where = (
        ("--rdzv-endpoint", "localhost:0", "--rdzv-id", "1") if backend == "c10d" else ("--master-port", "0")
    )
    command = (
        "train",
        "digits",
        "--processes",
        "1",
        "--device",
        "cpu",
        "--nnodes",
        "2",
        "--timeout-seconds",
        "3",
    )
    ended = end(start_command(*command, "--rdzv-backend", backend, *where), 150)
    assert ended.status == 1, ended.err
    assert re.search(r"evener: waiting for (1|the other) of 2 machines at .* for \d+ s", ended.err), ended.err
    assert "RankTimeoutError: the machines of the run did not find each other within 3 s" in ended.err
