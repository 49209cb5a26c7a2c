"""Scripts that are run on one device and on two ranks with shares 3,1: each verdict, and the line that it names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main
from evener.cli.verify import text_of_script
from evener.errors import ConfigurationError, ShareError
from evener.tools.verify_script import ScriptVerification, verify_script
from tests.distributed.processes import call
from tests.ranks import RankPool
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread
from tests.warm import Warm, alone_in

LOOPS = Path(__file__).parent / "loops"
RIGHT = [
    *spread(("assigned_gradients", "unreduced", "rollout"), ALWAYS),
    *spread(("accumulating", "tokens", "token_mean_of_samples", "thawed", "replaced"), SLOW),
    *spread(("by_hand", "compiled_step", "inner_func", "inner_clones", "stepping_hooks"), SLOW),
    *spread(("classifier", "adversaries", "clamped", "seeded_again"), NIGHTLY),
]
WRONG = [
    *spread(("second_term", "early_end", "wrong_count", "noisy_weights"), ALWAYS),
    *spread(("sum_by_length", "epoch_mean", "divided_by_ranks", "mixing_layer", "own_clipping"), SLOW),
    *spread(("contrastive", "rate_of_ranks"), NIGHTLY),
]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    return alone_in(tmp_path)


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


_PACKAGE = {
    "pieces/__init__.py": "",
    "pieces/net.py": "import torch\n\n\ndef net():\n    return torch.nn.Linear(4, 3)\n",
    "pieces/own/__init__.py": "",
    "pieces/own/loop.py": """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

from ..net import net

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
model = net()
train, model, optimizer, loss = evener.prepare(
    DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=8),
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    nn.CrossEntropyLoss(),
)
for x, y in train:
    optimizer.zero_grad()
    value = loss(model(x), y) * (len(x) if "wrong" in sys.argv else 1)
    value.backward()
    optimizer.step()
""",
    "pieces/__main__.py": "from pieces.own import loop\n",
}


def test_a_module_of_a_package_is_verified_by_its_name(
    tmp_path: Path, ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports from its package, as with ``python -m``, and its lines are named wherever they are in it."""
    Warm(tmp_path, ranks, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in _PACKAGE.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    settings: dict[str, Any] = {"is_module": True, "device": "cpu", "timeout_seconds": 20.0}
    assert verify_script("pieces", **settings).passed
    found = verify_script("pieces.own.loop", ["wrong"], **settings)
    assert not found.passed
    assert found.line.startswith(str(Path("pieces", "own", "loop.py")))


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
    assert len(found.losses) >= found.steps > 0 or name in ("assigned_gradients", "by_hand", "stepping_hooks")
    assert not os.listdir(), "a run writes into a directory of its own"


@pytest.mark.parametrize("words", [("sharded",), ("sharded", "zero=1"), ("tensor",)], ids="_".join)
def test_divided_models_pass(proof: Any, words: tuple[str, ...]) -> None:
    found = proof("divided", *words)
    assert found.passed, found
    assert 0 < found.times_floor < found.limit / 3


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_fail_at_their_line(proof: Any, name: str) -> None:
    found = proof(name)
    assert not found.passed
    check_line(name, found)


@pytest.mark.parametrize(
    ("name", "found", "hint"),
    [
        (
            "rate_of_own_samples",
            "refuses it on 2 ranks.*another learning rate",
            "the learning rate is .* on one device",
        ),
        pytest.param(
            "inner_step",
            "refuses it .*torch.autograd.grad",
            "torch.autograd.grad gives a gradient of this rank's samples",
            marks=NIGHTLY,
        ),
        ("by_hand_alone", "refuses it .*torch.autograd.grad", "torch.autograd.grad gives a gradient"),
        (
            "padding",
            "the loss is",
            r"a tensor of the batch has the sizes 8 x 3 x 1 .* and 2 x . x 1 on rank 1",
        ),
        ("teacher", "the loss is", "1 BatchNorm layers of models that were not prepared"),
    ],
)
def test_the_cause_is_named_with_its_line(proof: Any, name: str, found: str, hint: str) -> None:
    verdict = proof(name)
    assert not verdict.passed
    assert verdict.source.endswith("# parts"), verdict
    assert re.search(found, verdict.found), verdict.found
    assert re.search(hint, verdict.hint), verdict.hint


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


def test_an_epoch_that_is_longer_than_the_runs_ends_with_them(proof: Any) -> None:
    found = proof("epoch_mean_later", steps=3)
    assert not found.passed
    check_line("epoch_mean_later", found)
    assert found.found.startswith("one device prints '3 batches: ")
    assert (found.steps, found.passes, found.ended_by_limit) == (3, 1, True)


@pytest.mark.parametrize("balance", spread(["3,1", "1,1"], ALWAYS, NIGHTLY))
def test_what_fails_after_a_pass_that_was_cut_short_is_no_fault(proof: Any, balance: str) -> None:
    found = proof("counting", steps=2, balance=balance)
    assert found.passed, found
    assert (found.steps, found.passes, found.ended_by_limit) == (2, 1, True)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "steps"), [("classifier", 3), ("counting", None)])
def test_a_pass_counts_once_whole_or_cut_short(proof: Any, name: str, steps: int | None) -> None:
    assert proof(name, **({} if steps is None else {"steps": steps})).passes == 1


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
    assert "no end of an epoch came within these steps" not in printed
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["passed"], written["steps"], written["processes"]) == (True, 3, 2)
    status = warm.status("evener", "verify", *given, str(LOOPS / "classifier.py"), "--", "--epochs", "none")
    assert status == 1
    printed = capsys.readouterr().out
    assert printed.startswith("FAIL: ")
    assert "classifier.py could not be compared\n" in printed
    assert "the script fails on one device: ended with status 2" in printed
    assert "main(parser.parse_args().epochs)" in printed


def test_a_loop_without_a_loader_has_no_end_of_an_epoch() -> None:
    found = ScriptVerification("loop.py", 2, "3,1", 20, ended_by_limit=True, passed=True)
    assert "no end of an epoch came within these steps" in text_of_script(found)
    for seen in ({"passes": 1}, {"ended_by_limit": False}):
        assert "no end of an epoch" not in text_of_script(replace(found, **seen))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing.py",), "no script 'nothing.py'"),
        (("-m", "nothing.at.all"), "no module named 'nothing.at.all'"),
        (("-m", "pieces", "--bits"), "--bits compares the bits of a TASK"),
        (("-m", "pieces", "--batch-size", "4"), "--batch-size goes with a TASK"),
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
    found = call(verify_script, LOOPS / "failing.py", processes=2, device="cpu", timeout_seconds=60.0)
    assert not found.passed
    assert "on 2 ranks, and not on one device: rank 1: raised ValueError: I want more samples" in found.found
    assert found.source == 'raise ValueError("I want more samples")  # parts'
