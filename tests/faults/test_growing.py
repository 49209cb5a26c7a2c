"""Ranks and machines come and go in one run, which stays the training of one device. Launchers stand for machines."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from benchmarks.namespaces import Hosts, NoNamespacesError, Program
from torch import Tensor

from evener.checkpoint.weights_file import read_weights
from evener.training.fit import fit
from tests.distributed.processes import Ended, end, is_alive, start_command
from tests.faults import tasks_growing
from tests.faults.tasks_growing import BATCH, EPOCHS, SAMPLES, STEPS

pytestmark = pytest.mark.slow

TASK = "tests.faults.tasks_growing:grows"
PATIENCE_SECONDS = 180.0


class Rehearsal:
    """A run and its launchers, in a directory."""

    def __init__(self, home: Path) -> None:
        self.home, self.run = home, home / "run"
        self.programs: list[Any] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]

    def machine(self, *options: str, task: str = TASK) -> Any:
        """Starts the launcher of a machine."""
        meeting = (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"localhost:{self.port}",
            "--rdzv-id",
            "growing",
        )
        conf = ("--rdzv-conf", "last_call_timeout=3", "--processes", "1")
        return self.start(task, "--nnodes", "1:3", *meeting, *conf, *options)

    def start(self, task: str, *options: str) -> Any:
        settings = ("--device", "cpu", "--dtype", "float64", "--save-every", "1h", "--timeout-seconds", "60")
        words = ("train", task, "--run-dir", self.run, *settings, *options)
        program = start_command(*words, program=tasks_growing.hasty)
        self.programs.append(program)
        return program

    def records(self, kind: str) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = (self.run / "records.jsonl").read_text().splitlines(keepends=True)
            found = [json.loads(line) for line in lines if line.endswith("\n")]
            return [record for record in found if record["kind"] == kind]
        return []

    @property
    def notes(self) -> list[str]:
        return [record["words"] for record in self.records("note")]

    def last_shares(self, steps: int) -> list[int]:
        """The number of ranks that took each of the last steps."""
        return [len(step["shares"]) for step in self.records("step")][-steps:]

    def goes_on(self, ranks: int) -> None:
        """Waits until so many ranks have taken some steps."""
        self.waits(lambda: self.last_shares(2) == [ranks] * 2)

    def waits(self, look: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not look():
            assert time.monotonic() < deadline, self.notes
            assert not self.programs or any(program.poll() is None for program in self.programs), self.notes
            time.sleep(0.05)

    @property
    def ranks(self) -> list[int]:
        """The process ids of ranks that have computed something, and live."""
        pids = [int(path.name.partition("-")[2]) for path in self.home.glob("journal-*")]
        return sorted(filter(is_alive, pids))

    def hurry(self) -> None:
        (self.home / "hurry").touch()

    def is_training_of_one_device(self, expected: dict[str, Tensor]) -> None:
        """Each step is recorded once, no sample was computed twice, and the weights are those of one device."""
        steps = self.records("step")
        assert [step["step"] for step in steps] == list(range(STEPS))
        assert {sum(step["shares"]) for step in steps} == {BATCH}
        journals = [path.read_text().splitlines() for path in self.home.glob("journal-*")]
        computed = Counter(sample for lines in journals for line in lines for sample in json.loads(line))
        assert computed == dict.fromkeys(range(SAMPLES), EPOCHS)
        found = read_weights(self.run)
        assert found.keys() == expected.keys()
        assert all((found[name] - expected[name]).abs().max() < 1e-9 for name in expected)


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    monkeypatch.setenv("EVENER__TESTS_FAULT", str(tmp_path))
    found = Rehearsal(tmp_path)
    yield found
    for program in found.programs:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of one device."""
    home = tmp_path_factory.mktemp("one")
    (home / "hurry").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENER__TESTS_FAULT", str(home))
        return fit(tasks_growing.grows, device="cpu", processes=1, dtype="float64", show=False).weights


def ended(*programs: Any) -> list[Ended]:
    return [end(program, PATIENCE_SECONDS) for program in programs]


def test_machines_come_and_go(rehearsal: Rehearsal, expected: dict[str, Tensor]) -> None:
    """From one to three and to two. One with another seed is refused before; a notice command tells of an end."""
    first = rehearsal.machine()
    rehearsal.goes_on(1)
    (refused,) = ended(rehearsal.machine("--seed", "1"))
    assert refused.status == 2
    assert "this machine cannot join the run 'growing': setting seed is 1 here and 0 there" in refused.err

    leaving = rehearsal.machine("--notice-command", f"test -e {rehearsal.home / 'notice'}")
    staying = rehearsal.machine("--notice-command", "nosuchcommand-")
    rehearsal.goes_on(3)
    (rehearsal.home / "notice").touch()
    left = end(leaving, PATIENCE_SECONDS)
    assert left.status == 128 + signal.SIGTERM
    assert "says that this host is about to be taken away" in left.err
    assert "and the others go on" in left.err
    rehearsal.goes_on(2)
    rehearsal.hurry()
    one, two = ended(first, staying)
    assert (one.status, two.status) == (0, 0), one.err + two.err
    assert two.err.count("the notice command") == 1
    rehearsal.is_training_of_one_device(expected)
    counts = [len(step["shares"]) for step in rehearsal.records("step")]
    assert (counts[0], max(counts), counts[-1]) == (1, 3, 2)
    notes = rehearsal.notes
    assert [note for note in notes if note.endswith((" comes", " come"))]
    assert [note for note in notes if "leaves with rank" in note and note.endswith("on SIGTERM")]


def test_a_machine_that_joins_leaves_the_bits(rehearsal: Rehearsal) -> None:
    exact = ("--exact", "bits", "--grain", "8")
    first = rehearsal.machine(*exact)
    rehearsal.goes_on(1)
    second = rehearsal.machine(*exact)
    rehearsal.goes_on(2)
    rehearsal.hurry()
    assert [program.status for program in ended(first, second)] == [0, 0]
    shares = {len(step["shares"]) for step in rehearsal.records("step")}
    assert shares == {1, 2}
    one = fit(
        tasks_growing.grows, device="cpu", processes=1, dtype="float64", exact="bits", grain=8, show=False
    )
    found = read_weights(rehearsal.run)
    assert all(torch.equal(found[name], weight) for name, weight in one.weights.items())


@pytest.mark.parametrize("moment", ["it waits", "its rank starts"])
def test_a_machine_that_dies_while_it_joins_leaves_no_trace(
    rehearsal: Rehearsal, expected: dict[str, Tensor], moment: str
) -> None:
    first = rehearsal.machine()
    rehearsal.goes_on(1)
    dying = rehearsal.machine()
    if moment == "it waits":
        rehearsal.waits(lambda: any(note.endswith(" comes") for note in rehearsal.notes))
    else:
        # The first one starts the others.
        rehearsal.waits(lambda: len(psutil.Process(dying.pid).children()) > 1)
    dying.kill()
    end(dying)
    before = len(rehearsal.records("step"))
    rehearsal.waits(lambda: len(rehearsal.records("step")) > before + 1)
    rehearsal.hurry()
    (one,) = ended(first)
    assert one.status == 0, one.err
    assert {len(step["shares"]) for step in rehearsal.records("step")} == {1}
    rehearsal.is_training_of_one_device(expected)


def test_a_machine_with_another_model_is_refused_by_the_ranks(
    rehearsal: Rehearsal, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher knows of no difference, so that the ranks meet, and those of the run start once more without it."""
    first = rehearsal.machine()
    rehearsal.goes_on(1)
    monkeypatch.setenv("EVENER__TESTS_OTHER", "1")
    (other,) = ended(rehearsal.machine())
    assert other.status == 2, other.err
    assert "ConfigurationError" in other.err
    assert "Every rank must build the same model" in other.err
    before = len(rehearsal.records("step"))
    rehearsal.waits(lambda: len(rehearsal.records("step")) > before + 1)
    rehearsal.hurry()
    (one,) = ended(first)
    assert one.status == 0, one.err
    rehearsal.is_training_of_one_device(expected)


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_ranks_come_and_go(rehearsal: Rehearsal, expected: dict[str, Tensor], strategy: str) -> None:
    """From three to one and back, as asked, and to two and one by signals, the last of them to the first rank.

    With ddp no process that stays is started anew.
    """
    program = rehearsal.start(TASK, "--processes", "1:3", "--strategy", strategy)
    rehearsal.goes_on(3)
    began = rehearsal.ranks
    for ranks in (1, 3):
        (asked,) = ended(start_command("resize", rehearsal.run, str(ranks)))
        assert asked.status == 0, asked.err
        assert f"{ranks} instead of {4 - ranks} ranks, as asked, after step" in asked.out
        rehearsal.goes_on(ranks)
    (refused,) = ended(start_command("resize", rehearsal.run, "3"))
    assert (refused.status, "has 3 ranks already" in refused.err) == (2, True), refused.err
    now = rehearsal.ranks
    assert len(set(began) & set(now)) == (strategy == "ddp")
    for left, number in ((2, 1), (1, 0)):
        leaving = now[number]
        os.kill(leaving, signal.SIGUSR1)
        rehearsal.goes_on(left)
        before, now = now, rehearsal.ranks
        assert (set(now) < set(before)) == (strategy == "ddp")
    in_memory = [note for note in rehearsal.notes if "with what rank 0 had in memory" in note]
    assert len(in_memory) == (4 if strategy == "ddp" else 0)
    rehearsal.hurry()
    (whole,) = ended(program)
    assert whole.status == 0, whole.err
    assert "trained digits with single on 1 rank" in whole.out
    rehearsal.is_training_of_one_device(expected)
    assert sum("leaves, on SIGUSR1" in note for note in rehearsal.notes) == 2


def test_a_rank_that_dies_while_it_joins_costs_no_step(
    rehearsal: Rehearsal, expected: dict[str, Tensor]
) -> None:
    """It dies before the others have the state of the one that stays: all start again from what was saved before."""
    program = rehearsal.start(TASK, "--processes", "1:3")
    rehearsal.goes_on(3)
    (asked,) = ended(start_command("resize", rehearsal.run, "1"))
    assert asked.status == 0, asked.err
    rehearsal.goes_on(1)
    launcher = psutil.Process(program.pid)
    # Also those of ranks that have left, until the launcher starts another one.
    before = set(launcher.children())
    asking = start_command("resize", rehearsal.run, "3")
    rehearsal.waits(lambda: len(set(launcher.children()) - before) == 2)  # so that the first one runs
    min(set(launcher.children()) - before, key=lambda child: child.create_time()).kill()
    (asked,) = ended(asking)
    assert asked.status == 0, asked.err
    rehearsal.goes_on(2)
    rehearsal.hurry()
    (whole,) = ended(program)
    assert whole.status == 0, whole.err
    assert "was killed by SIGKILL" in whole.err
    assert "restart 1 of 2, with 2 ranks" in whole.err
    rehearsal.is_training_of_one_device(expected)


def test_a_notice_that_leaves_too_few_ends_the_run(rehearsal: Rehearsal) -> None:
    """Of 2:3, one rank leaves; the second one ends the run as a signal to all does, and nobody starts it again."""
    program = rehearsal.start(TASK, "--processes", "2:3")
    rehearsal.goes_on(3)
    os.kill(rehearsal.ranks[2], signal.SIGUSR1)
    rehearsal.goes_on(2)
    os.kill(rehearsal.ranks[1], signal.SIGUSR1)
    (whole,) = ended(program)
    assert whole.status == 128 + signal.SIGUSR1, whole.err
    assert re.search(r"interrupted by SIGUSR1 at step \d+, saved. Continue: ", whole.err)
    assert "restart" not in whole.err
    assert rehearsal.notes[-1] == "all ranks end, for 1 rank would be left"
    saved = [int(path.name.partition("-")[2]) for path in (rehearsal.run / "checkpoints").glob("step-*")]
    assert max(saved) == len(rehearsal.records("step"))


def test_the_machine_that_keeps_the_store_takes_the_others_with_it(rehearsal: Rehearsal) -> None:
    first = rehearsal.machine()
    rehearsal.goes_on(1)
    second = rehearsal.machine()
    rehearsal.goes_on(2)
    os.kill(first.pid, signal.SIGTERM)
    for one in ended(first, second):
        assert one.status == 128 + signal.SIGTERM, one.err
        assert "saved. Continue: " in one.err
    assert rehearsal.notes[-1].endswith("keeps the store through which the machines meet")


def test_hosts_come_and_go(rehearsal: Rehearsal, expected: dict[str, Tensor]) -> None:
    """Two network namespaces: the second comes later, and leaves at a notice."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "hosts")
    settings = ("--run-dir", str(rehearsal.run), "--device", "cpu", "--dtype", "float64", "--processes", "1")
    notice = rehearsal.home / "notice"
    begun = f"until ls {rehearsal.home}/journal-* > /dev/null 2>&1; do sleep 0.1; done"
    train = [sys.executable, "-m", "evener", "train", TASK, *settings, "--nnodes", "1:3", *meeting]
    commands = [
        shlex.join(train),
        f"{begun}; {shlex.join(train)} --notice-command 'test -e {notice}'; test $? = {128 + signal.SIGTERM}",
    ]
    environment = {"OMP_NUM_THREADS": "1"}
    programs = [Program(host, ["sh", "-c", command], environment) for host, command in enumerate(commands)]
    try:
        with Hosts(2) as hosts, ThreadPoolExecutor(1) as pool:
            printed = pool.submit(hosts.run, programs, 2 * PATIENCE_SECONDS)
            rehearsal.waits(lambda: printed.done() or rehearsal.last_shares(2) == [2, 2])
            notice.touch()
            rehearsal.waits(lambda: printed.done() or rehearsal.last_shares(2) == [1, 1])
            rehearsal.hurry()
            printed.result()
    except NoNamespacesError as error:
        pytest.skip(str(error))
    rehearsal.is_training_of_one_device(expected)
    assert any(note.startswith("host1 leaves with rank ") for note in rehearsal.notes)
