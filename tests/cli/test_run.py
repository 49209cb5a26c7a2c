"""The command that runs a script under Evener."""

from __future__ import annotations

import pytest

from evener.cli.main import parser
from evener.cli.options import config_of
from evener.cli.run import command_again


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (["--observe", "--run-dir", "a", "script.py", "--lr", "1"], ["script.py", "--lr", "1"]),
        (
            ["--processes", "2", "--device", "cpu", "-m", "package"],
            ["--processes", "2", "--device", "cpu", "-m", "package"],
        ),
    ],
)
def test_the_command_that_runs_a_script_again_has_what_was_given(given: list[str], again: list[str]) -> None:
    arguments = parser("run").parse_args(["run", *given])
    assert command_again(arguments, config_of(arguments)) == ["evener", "run", *again]
