from __future__ import annotations

import shlex

import pytest

from evener.cli.main import parser
from evener.cli.train import command_that_continues, saying_how_to_continue
from evener.errors import InterruptedRunError


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
