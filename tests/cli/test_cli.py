"""The command as a user meets it: what it prints, and with which status it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.cli.main import command, main
from evener.distributed.launch import exit_watch as ends
from tests.distributed.processes import await_death, end, run, start_command
from tests.tiers import NIGHTLY, SLOW, spread

TRAIN = ["--processes", "1", "--device", "cpu"]
PAIR = ["--processes", "2", "--device", "cpu", "--timeout-seconds", "60"]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def status_of(*arguments: Any) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse
        return int(end.code or 0)


def test_help_does_not_import_torch() -> None:
    """It answers at once; libraries are loaded by the command that needs them."""
    ask = (
        "import sys\nfrom evener.cli.main import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    print('status', end.code, 'torch' in sys.modules)"
    )
    for arguments, words in (
        (["--help"], ["train", "run", "verify"]),
        (["train", "--help"], ["--batch-size", "--shares", "--rdzv-endpoint", "samples in a global batch"]),
        (["verify", "--help"], ["--tolerance", "--micro-batch", "--json"]),
        (["run", "--help"], ["--module", "SCRIPT"]),
        (["devices", "--help"], ["--save", "--from", "--no-measure"]),
        (["train"], []),
    ):
        ended = run("-c", ask, *arguments)
        assert ended.out.splitlines()[-1] == f"status {2 if arguments == ['train'] else 0} False"
        assert all(word in ended.out for word in words)


@pytest.mark.parametrize(
    ("given", "variable", "seconds"),
    [
        (["--timeout-seconds", "15"], "", 15.0),
        ([], "20", 20.0),
        ([], "", 300.0),
        (["--timeout-seconds", "0"], "", 300.0),
        (["--timeout-seconds", "many"], "", 300.0),
    ],
)
def test_the_process_may_take_as_long_to_end_as_ranks_may_wait(
    monkeypatch: pytest.MonkeyPatch, given: list[str], variable: str, seconds: float
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(ends, "leaving", limits.append)
    monkeypatch.setattr(sys, "argv", ["evener", "train", "nowhere:task", *given])
    if variable:
        monkeypatch.setenv("EVENER_TIMEOUT_SECONDS", variable)
    with pytest.raises(SystemExit):
        command()
    assert limits == [seconds]


def shares(*text: str) -> list[str]:
    return ["train", "digits", *PAIR, *text]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, ["COMMAND"]),
        (["trian", "digits"], 2, ["invalid choice: 'trian'"]),
        (["train", "digit", *TRAIN], 2, ["no task is called 'digit'; known are digits, mnist, shakespeare"]),
        (["train", "tests.tasks:plane", *TRAIN], 2, ["module tests.tasks has no plane", "plain"]),
        (["train", "nowhere.at.all:task", *TRAIN], 2, ["there is no module 'nowhere'"]),
        (
            ["train", "tests.tasks:not_a_task", *TRAIN],
            2,
            ["returned of type int; it must return an evener.Task"],
        ),
        (["train", "digits", "--data-dir", "x", *TRAIN], 2, ["with the options data_dir"]),
        (["train", "digits", "--option", "depth", *TRAIN], 2, ["--option 'depth' is not KEY=VALUE"]),
        (["train", "shakespeare", *TRAIN], 2, ["--data-dir PATH"]),
        (shares("--shares", "0.5,0.6"), 2, ["0.5,0.6", "1.1"]),
        (shares("--shares=-1,2"), 2, ["-1"]),
        (shares("--shares", "1,2,3"), 2, ["3", "2 ranks"]),
        (shares("--shares", "0,0"), 2, ["0"]),
        (shares("--balance", "fair"), 2, ["no balancer is called 'fair'", "equal"]),
        (
            ["train", "digits", "--batch-size", "0"],
            2,
            ["batch_size is 0; it must be a whole number of at least 1"],
        ),
        (["train", "digits", "--batch-size", "many"], 2, ["invalid int value: 'many'"]),
        (["train", "digits", "--dtype", "int8"], 2, ["invalid choice: 'int8'"]),
        (["train", "digits", "--device", "cuda", "--processes", "99"], 2, ["99", "cuda|CUDA|GPU"]),
        (["train", "digits", "--strategy", "magic", *TRAIN], 2, ["no strategy is called 'magic'", "ddp"]),
        (["train", "digits", "--resume", "nothing", *TRAIN], 2, ["no checkpoint at .*/nothing"]),
        (
            ["train", "tests.tasks:no_count", *TRAIN],
            2,
            ["count=lambda targets", "total=lambda outputs, targets"],
        ),
        (["train", "tests.tasks:no_pairs", *TRAIN], 1, ["DataError", "(inputs, targets)"]),
        (
            ["train", "tests.tasks:explodes", *TRAIN],
            1,
            ["DivergenceError: the loss is (nan|inf) in step", "rank 0"],
        ),
        (["verify", "digits", *TRAIN], 2, ["nothing to verify with 1 process"]),
        (["run", "nothing.py", *TRAIN], 2, ["nothing.py"]),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) and value and value[0].islower() else "",
)
def test_what_a_user_gets_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: list[str]
) -> None:
    assert status_of(*arguments) == status
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    for word in words:
        assert re.search(word, shown) or word in shown
    last = [line for line in shown.splitlines() if line.startswith("evener")]
    assert len(last) == 1, "the error is one sentence"


@pytest.mark.parametrize(
    "content", [None, b"", b"\x00\x00\x08\x03 not images"], ids=["none", "empty", "wrong"]
)
def test_files_of_mnist_that_are_missing_or_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None
) -> None:
    names = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    if content is not None:
        for name in names:
            (tmp_path / name).write_bytes(content)
    assert status_of("train", "mnist", "--data-dir", tmp_path, *TRAIN) in (1, 2)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert str(tmp_path) in shown
    assert names[0] in shown


def test_an_epoch_on_one_process_from_the_users_own_module(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.tasks import plain\ndef task(width: int):\n    return plain()\n"
    )
    train = ["train", "mine:task", "--option", "width=3", *TRAIN]
    assert status_of(*train, "--epochs", "1", "--json", "out.json") == 0
    captured = capsys.readouterr()
    assert "trained plain with single on 1 rank" in captured.out
    assert "; evaluation: loss" in captured.err
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("mine-task-")
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(
        (run_dir / "summary.json").read_text()
    )
    said = []
    for place in (run_dir, run_dir / "checkpoints", run_dir / "checkpoints" / "latest"):
        assert status_of(*train, "--epochs", "2", "--resume", place) == 0
        said.append(capsys.readouterr().out)
    assert "8 steps, 2 epochs, 47 of 94 samples" in said[0]
    assert all("8 steps, 2 epochs were done before; none was left to take" in each for each in said[1:])


@pytest.mark.usefixtures("warm")
def test_a_few_epochs_of_digits_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "digits", *PAIR, "--epochs", "3", "--run-dir", "here", "--json", "out.json"]
    assert status_of(*train, "--shares", "0.7,0.3") == 0
    summary = json.loads(Path("out.json").read_text())
    assert summary["metrics"]["accuracy"] > 0.9
    assert summary["world_size"] == 2
    assert summary["shares"] == pytest.approx([0.7, 0.3], abs=0.01)
    assert "70." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_division_of_the_work_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    verify = ["verify", "digits", "--device", "cpu", "--processes", "3", "--steps", "6", "--json", "out.json"]
    verify += ["--dtype", "float64", "--batch-size", "97"]
    assert status_of(*verify, "--shares", "0.5,0.3,0.2") == 0
    result = json.loads(Path("out.json").read_text())
    assert result["max_relative_weight_error"] <= 1e-12
    assert result["replicas_identical"] is True
    assert len(result["losses"]) == len(result["reference_losses"]) == 6
    shown = capsys.readouterr().out
    assert shown.startswith("PASS: the training of one device")
    assert result["worst_parameter"] in shown


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_wrong_division_is_found_out(capsys: pytest.CaptureFixture[str]) -> None:
    verify = ["verify", "tests.tasks:plain", *PAIR, "--steps", "4", "--json", "out.json"]
    assert status_of(*verify, "--strategy", "tests.training.test_exactness:Averaging", "--shares", "3,1") == 1
    result = json.loads(Path("out.json").read_text())
    assert result["passed"] is False
    assert result["max_relative_weight_error"] > 1e-4
    assert "FAIL: not the training of one device" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_that_fails_on_one_rank_is_shown_once_with_its_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("train", "tests.tasks:fails_on_rank_one", *PAIR) == 1
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 1
    assert shown.count("RuntimeError: this layer has no luck") <= 2  # the headline, and the traceback's end
    assert "evener: rank 1 raised RuntimeError: this layer has no luck" in shown
    assert "tests/tasks.py" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_nan_on_one_rank_names_step_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("train", "tests.tasks:one_bad_target", *PAIR) == 1
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert "the loss is nan in step" in shown
    assert "on rank" in shown


@pytest.mark.parametrize("number", spread([signal.SIGINT, signal.SIGTERM], SLOW, NIGHTLY))
def test_a_signal_ends_all_ranks_and_leaves_the_summary(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to all processes of the terminal, SIGTERM to the command alone."""
    train = ["train", "tests.tasks:slow", *PAIR, "--run-dir", str(tmp_path / "run")]
    program = start_command(*train)
    try:
        await_steps(tmp_path / "run" / "records.jsonl")
        ranks = program.ranks()
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        else:
            program.send_signal(number)
        ended = end(program, timeout=120)
    finally:
        program.kill()
    assert ended.status == 128 + number
    assert f"{number.name}" in ended.err
    assert "step" in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err
    await_death(ranks)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps"] >= 3


@pytest.mark.slow
def test_a_rank_that_is_stuck_leaves_its_summary(tmp_path: Path) -> None:
    """It waits in native code for one that was stopped, where no exception reaches it."""
    native = [*PAIR, "--allreduce", "native", "--run-dir", str(tmp_path / "run"), "--grace-seconds", "3"]
    program = start_command("train", "tests.tasks:slow", *native)
    try:
        await_steps(tmp_path / "run" / "records.jsonl")
        first, second = sorted(program.ranks())
        os.kill(second, signal.SIGSTOP)
        time.sleep(0.5)
        program.send_signal(signal.SIGTERM)
        ended = end(program, timeout=120)
    finally:
        program.kill()
    assert ended.status == 128 + signal.SIGTERM
    await_death([first, second])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["samples_per_second"] * summary["seconds"] == pytest.approx(summary["samples"], rel=0.5)


def await_steps(records: Path, deadline_seconds: float = 90) -> None:
    deadline = time.monotonic() + deadline_seconds
    while not records.exists() or len(records.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.05)


@pytest.mark.gpu
def test_a_task_trains_on_a_gpu() -> None:
    assert torch.cuda.is_available()
    assert status_of("train", "digits", "--processes", "1", "--epochs", "2", "--json", "out.json") == 0
    summary = json.loads(Path("out.json").read_text())
    assert summary["devices"][0].startswith("cuda:0")
    assert summary["metrics"]["accuracy"] > 0.8
