"""A run that is exact in bits keeps the bits of a run on one device through deaths, resumes and growth."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from evener.training.fit import fit
from tests.distributed.processes import start_command
from tests.faults import tasks_growing
from tests.faults.test_growing import TASK, Rehearsal, ended, rehearsal

__all__ = ["rehearsal"]
pytestmark = pytest.mark.slow

BITS = ("--exact", "bits", "--grain", "3", "--block", "1", "--dtype", "float32")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one device."""
    home = tmp_path_factory.mktemp("one")
    (home / "hurry").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENER__TESTS_FAULT", str(home))
        trained = fit(
            tasks_growing.grows,
            device="cpu",
            processes=1,
            dtype="float32",
            exact="bits",
            grain=3,
            block=1,
            show=False,
        )
    return trained.summary.weights_digest


def digest_of(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_digest"])


@pytest.mark.parametrize("balance", ["equal", "auto"])
def test_growth_keeps_the_bits(rehearsal: Rehearsal, expected: str, balance: str) -> None:
    program = rehearsal.start(TASK, "--processes", "2:4", "--balance", balance, *BITS)
    rehearsal.goes_on(4)
    for ranks in (2, 4):
        (asked,) = ended(start_command("resize", rehearsal.run, str(ranks)))
        assert asked.status == 0, asked.err
        rehearsal.goes_on(ranks)
    rehearsal.hurry()
    (whole,) = ended(program)
    assert whole.status == 0, whole.err
    assert digest_of(rehearsal.run) == expected
    assert f"weights sha256 {expected}" in whole.out


def test_a_kill_and_a_resume_on_another_number_keep_the_bits(
    rehearsal: Rehearsal,
    expected: str,
) -> None:
    program = rehearsal.start(TASK, "--processes", "3", *BITS, "--save-every", "3")
    rehearsal.waits(lambda: list(rehearsal.run.glob("checkpoints/step-*")))
    rehearsal.goes_on(3)
    os.killpg(program.pid, signal.SIGKILL)
    program.communicate()
    rehearsal.hurry()
    (whole,) = ended(rehearsal.start(TASK, "--processes", "2", *BITS, "--resume", "auto"))
    assert whole.status == 0, whole.err
    assert digest_of(rehearsal.run) == expected
