"""A rank that does not come is named with where it is, once, whatever the others wait in."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from evener.distributed.failure import record_failure
from evener.distributed.launch.launch import launch
from evener.distributed.session import Session
from evener.errors import RankError, RankTimeoutError
from tests.distributed.processes import call, end, start_script
from tests.tiers import NIGHTLY, SLOW, spread

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 4.0

TRAIN = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import evener
from evener.distributed.session import Session

processes, all_reduce, place, norm = int(sys.argv[1]), sys.argv[2] or None, sys.argv[3], sys.argv[4] == "norm"

class Sleeps(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if place == "forward" and self.calls > 3 and torch.distributed.get_rank() == 1:
            Path(__file__).with_suffix(".hung").write_text(str(time.time()))
            time.sleep(1000)  # here
        return x

def task():
    layers = [nn.Linear(4, 64), Sleeps(), *([nn.BatchNorm1d(64)] if norm else []), nn.Linear(64, 1)]
    return evener.Task(
        model=lambda: nn.Sequential(*layers),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(list(parameters), 0.1),
        train=TensorDataset(torch.ones(64, 4), torch.ones(64, 1)),
        batch_size=8,
    )

def train():
    with Session(device="cpu") as session:
        session.control.barrier()  # the limit is for the hang, not for the start on a busy machine
        session.timeout_seconds = session.watchdog.timeout_seconds = TIMEOUT
        with evener.Engine(task(), session=session, steps=6, allreduce=all_reduce) as engine:
            for batch in engine.batches():
                engine.step(batch)
                if place == "loop" and engine.steps_done > 3 and session.rank == 1:
                    Path(__file__).with_suffix(".hung").write_text(str(time.time()))
                    while True: time.time()  # here

try:
    evener.launch(train, processes=processes, device="cpu")
except evener.EvenerError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


@pytest.mark.parametrize(
    ("processes", "all_reduce", "place", "norm"),
    spread(
        [
            (2, "", "forward", ""),  # rank 0 waits in DDP's hook, in shared memory
            (3, "", "loop", ""),  # ... on the board of shared memory, where nothing is marked by DDP
            (2, "", "forward", "norm"),  # in an exchange of BatchNorm over gloo
            (2, "native", "forward", ""),  # in gloo, below DDP's reducer
            (2, "ring", "forward", ""),  # for a thread that exchanges messages
        ],
        SLOW,
        NIGHTLY,
        NIGHTLY,
        NIGHTLY,
    ),
)
def test_a_rank_that_does_not_come_is_named_once_with_its_line(
    tmp_path: Path, processes: int, all_reduce: str, place: str, norm: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("TIMEOUT", str(TIMEOUT_SECONDS)))
    lines = [number for number, text in enumerate(script.read_text().splitlines(), 1) if "# here" in text]
    ended = end(start_script(script, str(processes), all_reduce, place, norm))
    seconds = time.time() - float(script.with_suffix(".hung").read_text())
    assert ended.status == 1, ended.err
    assert TIMEOUT_SECONDS < seconds < TIMEOUT_SECONDS + 60, "a limit and not the five minutes of the default"
    assert ended.err.count("RankTimeoutError") == 1
    frame, told = r'^      (File "|\.\.\. and )', ended.err.strip().splitlines()
    first, late, *others = (line for line in told if not re.match(frame, line))
    assert re.match(rf'      File ".*train.py", line {lines[place == "loop"]} in ', told[2]), ended.err
    assert first.startswith("RankTimeoutError rank 0 has waited"), ended.err
    assert late.startswith("  rank 1 (host ")
    assert f"train.py:{lines[place == 'loop']} in " in late
    assert len(others) == processes - 1
    assert all(" waits in " in other for other in others), ended.err


def save_together(first_seconds: float, fault: str) -> float:
    """Rank 0 writes for so long while the others wait for it; the second time, rank 1 has its fault before it."""
    with Session(device="cpu") as session:
        group = session.patient_group()
        session.watchdog.timeout_seconds = 2.0
        began = time.monotonic()
        for step, seconds in enumerate((first_seconds, 1000.0)):
            if step == 1 and not fault:
                break
            if step == 1 and session.rank == 1 and fault == "elsewhere":
                time.sleep(1000)
            with session.watchdog.together("checkpoint", step):
                if session.rank == 0:
                    time.sleep(seconds)
                elif step == 1:
                    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
                with session.watchdog.wait("barrier"):
                    dist.barrier(group)
        return time.monotonic() - began


def test_what_all_ranks_do_together_may_take_longer_than_the_timeout() -> None:
    """Of 2 s. The ranks do not begin in the same instant, so who waits may see a little less than is slept."""
    assert min(call(launch, save_together, 7.0, "", processes=2, device="cpu")) > 6


@pytest.mark.parametrize("fault", spread(["elsewhere", "stopped"], SLOW, NIGHTLY))
def test_a_rank_that_leaves_the_others_to_save_alone_is_named(fault: str) -> None:
    with pytest.raises(
        RankTimeoutError, match=r"rank 1 was missing for \d+ s from checkpoint of step 1"
    ) as caught:
        call(launch, save_together, 0.0, fault, processes=2, device="cpu")
    late = str(caught.value).splitlines()[1]
    assert "rank 1 (host" in late
    assert ("is stopped" if fault == "stopped" else "test_hangs.py") in late


def test_a_rank_that_dies_while_others_save_is_named_at_once() -> None:
    with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
        call(launch, save_together, 0.0, "killed", processes=2, device="cpu")


def speak_and_hold() -> None:
    """Rank 1 has said why it ends, and holds Python's lock like the other before it comes to it."""
    with Session(device="cpu") as session:
        session.watchdog.timeout_seconds = 1.0
        time.sleep(1.5)  # for a heartbeat that tells the limit
        if session.rank == 1:
            record_failure(RankTimeoutError("rank 1 has waited in vain"), 1)
        sum(range(10**13))


def test_what_a_rank_has_said_goes_before_what_the_launcher_sees() -> None:
    with pytest.raises(RankTimeoutError, match=r"^rank 1 has waited in vain$"):
        call(launch, speak_and_hold, processes=2, device="cpu")
