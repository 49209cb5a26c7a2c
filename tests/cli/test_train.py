from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

import evener
from evener.balance.time_model import Line
from evener.cli.main import main, parser
from evener.cli.train import command_that_continues, saying_how_to_continue
from evener.core.config.run_config import RunConfig
from evener.errors import InterruptedRunError, RankError
from evener.tools.plan import Calibration, StepCosts, keep
from evener.tools.plan.calibration import counted_settings, this_machine
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.structure import structure_of
from evener.training.builtin_tasks import digits


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("slow:opt", "slow:opt"),
        (
            "slow:opt --option wide=7 --processes 1 --batch-size 25 --run-dir runs/opt",
            "slow:opt --option wide=7 --processes 1 --batch-size 25",
        ),
        ("slow:opt --run-dir=runs/opt --batch-size=25 --overwrite", "slow:opt --batch-size=25"),
        ("slow:opt --resume runs/first --run-dir runs/second", "slow:opt"),
        ("slow:opt --resume=runs/first --no-overwrite", "slow:opt"),
        ("--run-dir runs/opt slow:opt --weights first.pt", "slow:opt"),
        ("--config run.toml --run-dir runs/opt", "--config run.toml"),
        (
            "slow:opt --option 'text=two words' --run-directory=x",
            "slow:opt --option 'text=two words' --run-directory=x",
        ),
    ],
)
def test_the_command_that_continues_is_the_one_that_began(given: str, words: str) -> None:
    found = command_that_continues(["train", *shlex.split(given)], "runs/opt")
    assert found == f"evener train {words} --resume runs/opt"


def test_the_command_that_continues_is_a_command() -> None:
    given = ["train", "slow:opt", "--option", "text=a b", "--keep", "3", "--run-dir", "runs/my own"]
    with pytest.raises(InterruptedRunError) as raised, saying_how_to_continue(given):
        raise InterruptedRunError(
            "interrupted by SIGINT at step 5, saved. Continue with --resume runs/my own", 2
        )
    said, command = str(raised.value).split("Continue: evener ")
    assert (said, raised.value.exit_status) == ("interrupted by SIGINT at step 5, saved. ", 130)
    parsed = parser("train").parse_args(shlex.split(command))
    assert (parsed.task, parsed.option, parsed.keep) == ("slow:opt", ["text=a b"], 3)
    assert (str(parsed.resume), parsed.run_dir) == ("runs/my own", None)


def test_a_run_that_was_stopped_before_it_saved_says_no_command() -> None:
    with pytest.raises(InterruptedRunError, match=r"before any progress$"), saying_how_to_continue(["train"]):
        raise InterruptedRunError("interrupted by SIGINT before any progress", 2)


def run_that_fails() -> None:
    evener.fit("digits", run_dir=Path("runs/one"), save_every=4, epochs=1, processes=1, show=False)
    raise RankError("rank 1 was killed by SIGKILL")


def test_a_run_that_fails_says_from_where_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["train", "digits", "--processes", "1", "--run-dir", "runs/one", "--save-every", "4"]
    with pytest.raises(RankError) as raised, saying_how_to_continue(given):
        run_that_fails()
    last = max(path.name for path in Path("runs/one/checkpoints").glob("step-*"))
    assert raised.value.__notes__ == [
        f"The last checkpoint is {last}. Continue: evener train digits --processes 1 --save-every 4 --resume runs/one"
    ]
    with pytest.raises(RankError) as raised, saying_how_to_continue(given):
        raise RankError("before this run has a directory")
    assert not hasattr(raised.value, "__notes__")


@pytest.fixture
def plan_of_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan that is kept for one rank."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = RunConfig(device="cpu", processes=1)
    costs = {Candidate(1, "single"): StepCosts((Line(0.0, 1e-4),), 1, spread=0.05, sizes=(64,))}
    machine, settings = this_machine(), counted_settings(config)
    structure = structure_of(digits.task())
    found = Calibration("digits", 64, costs, machine=machine, settings=settings, structure=structure)
    path = keep(found, "digits", config)
    assert isinstance(path, Path)
    return path


TRAIN = ("train", "digits", "--device", "cpu", "--processes", "1", "--steps", "9")


def test_a_run_takes_the_plan_that_was_kept_and_teaches_it(
    plan_of_digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(TRAIN) == 0
    shown = capsys.readouterr()
    assert f"by {plan_of_digits}: --strategy single --processes 1, 6.4 ms a step" in shown.err
    assert "and --strategy ddp takes no plan" in shown.err
    assert "6.4 ms were predicted" in shown.out
    (learned,) = json.loads(plan_of_digits.read_text())["runs"]
    assert learned["options"] == "single --processes 1"


def test_a_run_says_why_it_goes_without_a_plan(
    plan_of_digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of_digits.write_text("{}")
    assert main(TRAIN) == 0
    shown = capsys.readouterr()
    assert f"without a plan: {plan_of_digits} is no plan that can be used" in shown.err
    assert "predicted" not in shown.out
    assert plan_of_digits.read_text() == "{}"
