"""The store of a run is gone: torchrun keeps it, and is killed. Its ranks live on, with nothing to ask about others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from evener.training.fit import fit
from tests.distributed.processes import await_death, await_files, end, start_module
from tests.faults.tasks_hangs import TIMEOUT_SECONDS

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "evener.cli.main")


def lose_the_store(
    task: str, directory: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> tuple[list[int], str]:
    """Kills torchrun when the task says so; the ranks that ended by themselves within so long, and what they said."""
    monkeypatch.setenv("EVENER__TESTS_FAULT", str(directory / "fault"))
    settings = ("--device", "cpu", "--run-dir", str(directory / "run"))
    program = start_module(*TORCHRUN, "train", f"tests.faults.{task}", *settings)
    await_files(directory / "fault")
    ranks = program.ranks()
    os.kill(program.pid, signal.SIGKILL)
    await_death(ranks, seconds)
    return ranks, end(program).err


@pytest.mark.slow
def test_ranks_that_need_nobody_train_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, said = lose_the_store("tasks:runs_for_a_while", tmp_path, monkeypatch, 120)
    assert len(ranks) == 2
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["steps"], summary["interrupted"]) == (60, False), said
    whole = fit("tests.faults.tasks:runs_for_a_while", processes=1, device="cpu", show=False).summary
    assert summary["samples"] == whole.samples


@pytest.mark.slow
def test_a_hang_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank knows of itself that its wait is hopeless, or that it makes no progress."""
    ranks, said = lose_the_store("tasks_hangs:forward", tmp_path, monkeypatch, TIMEOUT_SECONDS + 60)
    assert len(ranks) == 2
    assert "the store of the run has not answered for" in said
    assert "RankTimeoutError: rank 0 has waited" in said
