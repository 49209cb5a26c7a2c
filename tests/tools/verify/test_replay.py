"""``evener verify --replay``: an asynchronous run is repeated on one device, in the order of its records."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from evener.checkpoint.weights_file import read_weights
from evener.cli.main import main
from evener.errors import ConfigurationError, DataError
from evener.tools.verify.replay import ReplayedRun, replay
from evener.training.fit import fit


def leave_run(directory: str, strategy: str = "asynchronous") -> None:
    option = ("sync_every=6", "staleness=3", "damping=1") if strategy == "asynchronous" else ()
    run = Path(directory)
    fit("digits", strategy=strategy, strategy_option=option, epochs=1, device="cpu", run_dir=run, show=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    directory = tmp_path_factory.mktemp("asynchronous") / "run"
    ranks(2).run(leave_run, str(directory))
    return directory


def edited(run: Path, tmp_path: Path, edit: Any, steps: tuple[int, ...] = (1,)) -> Path:
    """A copy of a run in whose second section, or those of ``steps``, ``edit`` has changed the merges."""
    copied = tmp_path / "edited"
    shutil.copytree(run, copied)
    lines = [json.loads(line) for line in (copied / "records.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["step"] in steps:
            edit(line["merges"])
    (copied / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copied


def test_the_repetition_of_a_run_has_the_same_bits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--replay", str(run)]) == 0
    assert capsys.readouterr().out.startswith("PASS")
    found = replay(run)
    assert found.is_identical
    assert found.samples == 1437


def turn_round(merges: list[Any]) -> None:
    """Turns the order round, and makes no gradient older than its weights. Two merges that change places make less
    difference than disturbed last bits do, at times."""
    merges.reverse()
    for number, held in enumerate(merges):
        for each in held:
            each[1] = min(each[1], number)


def test_an_edited_order_is_found(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--replay", str(edited(run, tmp_path, turn_round, (0, 1, 2, 3)))]) == 1
    assert capsys.readouterr().out.startswith("FAIL")


def test_weights_that_are_nan_are_other_ones(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = dict(read_weights(run))
    weights[list(weights)[-1]].fill_(math.nan)
    monkeypatch.setattr("evener.tools.verify.replay.read_weights", lambda run: weights)
    assert not replay(run).passed


def lose(merges: list[Any]) -> None:
    del merges[1]


def hurry(merges: list[Any]) -> None:
    merges[0][0][1] = 5


def spoil(merges: list[Any]) -> None:
    merges[0][0] = ["a"]


@pytest.mark.parametrize("edit", [lose, hurry, spoil])
def test_records_that_cannot_be_are_refused(run: Path, tmp_path: Path, edit: Any) -> None:
    with pytest.raises(DataError):
        replay(edited(run, tmp_path, edit))


def test_other_runs_and_settings_are_refused(
    run: Path, tmp_path: Path, ranks: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigurationError, match="is no run directory"):
        replay(tmp_path)
    ranks(2).run(leave_run, str(tmp_path / "ddp"), "ddp")
    with pytest.raises(ConfigurationError, match="'ddp'"):
        replay(tmp_path / "ddp")
    assert main(["verify", "--replay", str(run), "--steps", "3"]) == 2
    assert "--steps does not go with --replay" in capfd.readouterr().err


def test_rounding_is_told_from_another_order() -> None:
    """What one cannot have on a machine with one kind of kernel."""
    told = {"run": "r", "task": "t", "sections": 1, "samples": 1, "merges": 1, "oldest": 0, "worst": "w"}
    found = ReplayedRun(is_identical=False, max_relative_error=1e-7, floor=1e-7, passed=True, **told)
    from evener.cli.verify import text_of_replay

    assert text_of_replay(found).startswith("PASS")
    assert "to rounding" in text_of_replay(found)


def test_a_directory_without_settings_is_no_run(tmp_path: Path) -> None:
    for text in ("[1]", "[" * 100_000, "3"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"its config\.json cannot be read"):
            replay(tmp_path)
