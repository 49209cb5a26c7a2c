from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from evener.distributed.ddp_profiler.report import DdpObserver, Observation, table
from evener.distributed.ddp_profiler.step_times import StepTimes
from evener.errors import ConfigurationError
from tests.distributed.processes import end, start_command

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    out = model(torch.ones(3 - dist.get_rank(), 4))
    if dist.get_rank() == 1:
        time.sleep(0.3)
    out.sum().backward()
    optimizer.step()
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_the_command_shows_which_rank_is_slow(script: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    options = ["--processes", "2", "--device", "cpu", "--observe", "--json", seen]
    ended = end(start_command("run", *options, script))
    assert ended.status == 0, ended.err
    assert "rank 1 is slowest, by its forward pass" in ended.err
    ranks = json.loads(seen.read_text())["ranks"]
    assert [(rank["rank"], rank["steps"], rank["samples"], rank["collectives"]) for rank in ranks] == [
        (0, 3, 3, 1),
        (1, 3, 2, 1),
    ]
    assert ranks[1]["compute_seconds"] >= 0.3
    assert ranks[0]["compute_seconds"] < ranks[1]["compute_seconds"]


@pytest.mark.nightly
def test_a_script_that_fails_is_told_about_too(script: Path) -> None:
    ended = end(start_command("run", "--processes", "2", "--device", "cpu", "--observe", script, "3"))
    assert ended.status == 3
    assert "     0        3" in ended.err
    assert "     1        3" in ended.err


def observation(rank: int, compute: float, input_: float = 0.0, steps: int = 10) -> Observation:
    return Observation(
        rank, steps, StepTimes(0.1, compute, input_seconds=input_, samples=8, collectives=2, nbytes=3 * 2**20)
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [observation(0, 0.02), observation(1, 0.08), observation(2, 0.06)],
            "rank 1 is slowest, by its forward pass: the others wait 40%",
        ),
        (
            [observation(0, 0.02, 0.07), observation(1, 0.04)],
            "rank 0 is slowest, by its data: the others wait 50%",
        ),
    ],
)
def test_who_is_slowest(ranks: list[Observation], words: str) -> None:
    lines = table(ranks).splitlines()
    assert words in lines[-1]
    assert "3 MiB" in lines[3]
    assert len(lines) == 4 + len(ranks)


def test_nobody_waits_for_more_than_its_step() -> None:
    """The steps of the ranks differ by a little, for each has its own clock and loses its first step."""
    slow = Observation(1, 10, StepTimes(0.1, 0.1))
    fast = [Observation(rank, 10, StepTimes(0.1 + 0.001 * rank, 0.0)) for rank in (0, 2)]
    assert "rank 1 is slowest, by its forward pass: the others wait 100% of a step" in table([*fast, slow])
    still = Observation(0, 10, StepTimes())
    assert "no rank is slow: the others wait 0% of a step" in table([still, slow])


def test_one_rank_waits_for_none_and_a_script_without_steps_is_said_to_have_none() -> None:
    assert "slowest" not in table([observation(0, 0.02)])
    assert "no step" in table([observation(0, 0.0, steps=0)])
    assert "no step" in table([])


def test_what_a_rank_leaves_is_what_the_launcher_tells(tmp_path: Path) -> None:
    stream = io.StringIO()
    observer = DdpObserver(tmp_path / "out" / "seen.json", stream)
    for rank in (1, 0):
        with observer.watching(rank, tmp_path):
            pass
    with observer.following(tmp_path):
        pass
    assert [entry["rank"] for entry in json.loads((tmp_path / "out" / "seen.json").read_text())["ranks"]] == [
        0,
        1,
    ]
    assert "no step" in stream.getvalue()


def test_json_alone_is_refused(script: Path) -> None:
    from evener.cli.main import parser

    parsed = parser().parse_args(["run", "--json", "x.json", str(script)])
    with pytest.raises(ConfigurationError, match="give --observe"):
        parsed.execute(parsed)
