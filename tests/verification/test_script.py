"""Scripts that are run on one device and on two ranks with shares 3,1: each verdict, and the line that it names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main
from evener.errors import ConfigurationError, ShareError
from evener.verification.script import ScriptVerification, verify_script
from tests.ranks import RankPool
from tests.warm import Warm

LOOPS = Path(__file__).parent / "loops"
RIGHT = (
    *("classifier", "accumulating", "adversaries", "tokens", "assigned_gradients", "token_mean_of_samples"),
    *("unreduced", "thawed", "clamped", "replaced", "seeded_again"),
)
WRONG = (
    *("second_term", "sum_by_length", "contrastive", "epoch_mean", "early_end", "divided_by_ranks"),
    *("rate_of_ranks", "mixing_layer", "wrong_count", "own_clipping", "noisy_weights"),
)


@pytest.fixture
def proof(
    tmp_path: Path, ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ScriptVerification]:
    """``verify_script`` on ranks that are up."""
    Warm(tmp_path, ranks, monkeypatch)
    monkeypatch.chdir(tmp_path)

    def proof(name: str, *args: str, **settings: Any) -> ScriptVerification:
        return verify_script(
            LOOPS / f"{name}.py", args, **{"device": "cpu", "timeout_seconds": 20.0} | settings
        )

    return proof


def check_line(name: str, found: ScriptVerification) -> None:
    """The line is one of those that are marked in the loop; a refusal names where it met the loop."""
    file, _, number = found.line.rpartition(":")
    assert Path(file).resolve() == LOOPS / f"{name}.py"
    assert (LOOPS / f"{name}.py").read_text().splitlines()[int(number) - 1].strip() == found.source
    if "Evener refuses it on 2 ranks, and not on one device" not in found.found:
        assert found.source.endswith("# parts"), found
        assert found.hint


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_pass(proof: Any, name: str) -> None:
    found = proof(name)
    assert found.passed, found
    assert (found.line, found.found, found.hint, found.also) == ("", "", "", [])
    assert found.replicas_identical
    assert 0 < found.times_floor < found.limit / 3
    assert found.losses == pytest.approx(found.reference_losses, rel=1e-12, nan_ok=True)
    assert len(found.losses) >= found.steps > 0 or name == "assigned_gradients"
    assert not os.listdir(), "a run writes into a directory of its own"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_fail_at_their_line(proof: Any, name: str) -> None:
    found = proof(name)
    assert not found.passed
    check_line(name, found)


@pytest.mark.parametrize(
    ("name", "found", "hint", "source"),
    [
        (
            "noise",
            "the loss is",
            "numbers drawn there",
            "value = loss(model(x + 0.1 * torch.randn_like(x)), y)  # parts",
        ),
        ("unprepared", "never calls evener.prepare with a model", "leave it to this command", ""),
        ("stepless", "no optimizer took a step", "one of torch.optim", ""),
        (
            "unsteady",
            "does not do the same twice",
            "torch.manual_seed(0)",
            "value = loss(model(x), y)  # parts",
        ),
        (
            "raising",
            "the script fails on one device: raised ValueError: no such thing",
            "",
            "raise ValueError",
        ),
    ],
)
def test_what_is_no_fault_of_the_sums_is_said(
    proof: Any, name: str, found: str, hint: str, source: str
) -> None:
    verdict = proof(name)
    assert not verdict.passed
    assert found in verdict.found
    assert hint in verdict.hint
    assert source in verdict.source


def test_a_run_ends_after_its_steps_and_arguments_are_the_scripts(proof: Any) -> None:
    whole = proof("classifier", "--epochs", "2", balance="1,2")
    assert (whole.steps, whole.ended_by_limit, whole.shares) == (8, False, "1,2")
    few = proof("classifier", steps=2, processes=3)
    assert (few.steps, few.ended_by_limit, few.passed, few.processes) == (2, True, True, 3)
    assert few.shares == "3,1,2"


def test_the_command(
    tmp_path: Path,
    ranks: Callable[[int], RankPool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    warm = Warm(tmp_path, ranks, monkeypatch)
    (tmp_path / "out.json").touch()
    given = ["--device", "cpu", "--json", "out.json"]
    assert warm.status("evener", "verify", str(LOOPS / "tokens.py"), *given, "--steps", "3") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PASS: ")
    assert "trains on 2 ranks with shares 3,1 as on one device" in printed
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["passed"], written["steps"], written["processes"]) == (True, 3, 2)
    status = warm.status("evener", "verify", *given, str(LOOPS / "classifier.py"), "--", "--epochs", "none")
    assert status == 1
    printed = capsys.readouterr().out
    assert printed.startswith("FAIL: ")
    assert "the script fails on one device: ended with status 2" in printed
    assert "main(parser.parse_args().epochs)" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing.py",), "no script 'nothing.py'"),
        (("digits", "--", "--epochs", "2"), "--epochs 2 stands behind --"),
        ((str(LOOPS / "tokens.py"), "--strategy", "sharded"), "--strategy goes with a TASK"),
        ((str(LOOPS / "tokens.py"), "--tolerance", "1"), "--tolerance goes with a TASK"),
        ((str(LOOPS / "tokens.py"), "--option", "a=1"), "--option goes with a TASK"),
        ((str(LOOPS / "tokens.py"), "--processes", "1"), "nothing to verify with 1 process"),
        ((str(LOOPS / "tokens.py"), "--shares", "1,2,3"), "3"),
    ],
)
def test_a_wrong_command_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ShareError):
        verify_script(LOOPS / "tokens.py", processes=2, balance="1,2,3")
    with pytest.raises(ConfigurationError, match="no script"):
        verify_script("nothing.py")


@pytest.mark.slow
def test_a_rank_that_fails_alone_is_named_with_its_line() -> None:
    found = verify_script(LOOPS / "failing.py", processes=2, device="cpu", timeout_seconds=60.0)
    assert not found.passed
    assert "on 2 ranks, and not on one device: rank 1: raised ValueError: I want more samples" in found.found
    assert found.source == 'raise ValueError("I want more samples")  # parts'
