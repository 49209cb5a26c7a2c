"""Stop signals that come while no run is there to handle them: a command says so, and cleans up."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from evener.cli import listing
from evener.cli.main import main
from evener.core.stop_signals import STOP_SIGNALS, interrupting


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_command_that_gets_a_stop_signal_says_so_and_removes_its_directory(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []

    def execute(_: Any) -> int:
        with tempfile.TemporaryDirectory() as directory:
            made.append(Path(directory))
            try:
                os.kill(os.getpid(), number)
            except Exception:  # as a trial that goes on with the next way
                pytest.fail("what is raised is no Exception")
        return 0

    monkeypatch.setattr(listing, "execute", execute)
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    assert main(["list"]) == 128 + number
    assert capsys.readouterr().err == f"evener: interrupted by {number.name}\n"
    assert not made[0].exists()
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


def test_signals_that_are_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupting():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_child_ends_by_the_signal() -> None:
    """As a worker that is terminated: no second process unwinds the command."""
    with interrupting():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
