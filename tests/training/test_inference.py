"""``evener evaluate`` and ``evener predict``: what a run's model says, on however many ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evener
from evener.checkpoint.weights_file import read_weights
from evener.cli.main import main
from evener.errors import ConfigurationError, DataError
from evener.training.reporting.task_file import is_known, name_of, origin
from tests import tasks
from tests.warm import Warm

ONE = ("--processes", "1", "--device", "cpu")
OWN = ("--task", "mine_applied:task")
MODULE = """
from pathlib import Path
import torch
from tests.tasks import batch_norm, plain

def task(width: int, data_dir: Path):
    assert width == 3
    assert isinstance(data_dir, Path)
    return batch_norm()

def other(width: int):
    return batch_norm()

def inputs():
    return [features for features, _ in plain().train]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a module and a run of its task, in float64, that was trained and evaluated."""
    home = tmp_path_factory.mktemp("applied")
    (home / "mine_applied.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(sys, "path", [str(home), *sys.path])
        given = ["--option", "width=3", "--data-dir", "some", "--dtype", "float64", "--batch-size", "10"]
        assert (
            main(
                [
                    "train",
                    "mine_applied:task",
                    *ONE,
                    *given,
                    "--epochs",
                    "2",
                    "--run-dir",
                    "run",
                    "--keep-best",
                    "loss",
                ]
            )
            == 0
        )
    return home


@pytest.fixture
def home(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return trained


def records(home: Path) -> list[dict[str, Any]]:
    lines = (home / "run/records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "evaluation"]


def test_an_evaluation_is_that_of_training(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", *OWN, *ONE, "--json", "found.json"]) == 0
    last = records(home)[-1]
    values = ", ".join(f"{name} {value:.4f}" for name, value in last["metrics"].items())
    assert capsys.readouterr().out == f"epoch 2: {values}\n"
    found = json.loads((home / "found.json").read_text())
    assert found["metrics"] == last["metrics"]
    assert (found["samples"], found["steps"], found["ranks"]) == (last["samples"], 10, 1)


def test_the_checkpoint_that_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sorted((home / "run/checkpoints").glob("step-*"))
    losses = [f"{record['metrics']['loss']:.4f}" for record in records(home)]
    for place, epoch in ((first, 1), (second, 2)):
        assert main(["evaluate", str(place), *OWN, *ONE]) == 0
        assert f"epoch {epoch}: loss {losses[epoch - 1]}" in capsys.readouterr().out
    assert main(["evaluate", "run", "--best", "--trust", *ONE]) == 0
    assert f"loss {min(losses)}" in capsys.readouterr().out


def test_outputs_are_the_same_on_any_number_of_ranks(
    home: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """47 samples on 2 and 3 ranks: each once, in the order of the dataset. Evaluations are equal to 12 digits."""
    ask = ["predict", "run", *OWN, "--data", "train", "--device", "cpu", "--overwrite", "--out"]
    assert main([*ask, "1.npy", "--processes", "1"]) == 0
    alone = np.load(home / "1.npy")
    assert alone.dtype == np.float64
    assert len(alone) == tasks.SAMPLES
    for number in (2, 3):
        warm = Warm(home, ranks, monkeypatch)
        assert (
            warm.status(
                "evener", *ask, "n.npy", "--processes", str(number), "--balance", "1,3,2"[: 2 * number - 1]
            )
            == 0
        )
        np.testing.assert_allclose(np.load(home / "n.npy"), alone, rtol=1e-12, atol=1e-13)
    assert "n.npy: outputs (47, 3)" in capsys.readouterr().out
    assert (
        warm.status(
            "evener", "evaluate", "run", "--trust", "--processes", "2", "--device", "cpu", "--json", "2.json"
        )
        == 0
    )
    found = json.loads((home / "2.json").read_text())
    assert found["metrics"] == pytest.approx(records(home)[-1]["metrics"], rel=1e-12)
    assert found["ranks"] == 2


def test_outputs_are_those_of_the_plain_model(home: Path) -> None:
    model = tasks.batch_norm().model().double().eval()
    model.load_state_dict(dict(read_weights(home / "run")))
    inputs = torch.stack([features for features, _ in tasks.plain().train]).double()
    np.save(home / "in.npy", inputs.numpy())
    for name, more in (("in.npy", []), ("mine_applied:inputs", ["--inputs-alone"])):
        assert (
            main(["predict", "run", *OWN, "--data", name, *more, "--out", "out.pt", "--overwrite", *ONE]) == 0
        )
        with torch.no_grad():
            torch.testing.assert_close(torch.load(home / "out.pt"), model(inputs))


def test_a_run_begins_with_the_weights_of_another(home: Path) -> None:
    begun = evener.fit(
        "tests.tasks:batch_norm",
        processes=1,
        device="cpu",
        dtype="float64",
        steps=1,
        weights=home / "run",
        show=False,
    )
    again = evener.fit(
        "tests.tasks:batch_norm", processes=1, device="cpu", dtype="float64", steps=1, show=False
    )
    assert begun.summary.final_loss < again.summary.final_loss


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "absent"], "absent is no run directory"),
        (["evaluate", "run", *OWN, "--data", "in.npy"], "in.npy holds inputs without targets"),
        (["evaluate", "run", "--task", "mine_applied:tsk"], "module mine_applied has no tsk"),
        (["evaluate", "run", "--task", "mine_applied:other"], "task 'mine_applied:other' cannot be built"),
        (
            ["evaluate", "run", *OWN, "--option", "depth=4"],
            "cannot be built with the options data_dir, depth, width",
        ),
        (["predict", "run", "--data", "train", "--out", "out.txt"], "ends with none of"),
        (["predict", "run", "--data", "train", "--out", "mine_applied.py"], "ends with none of"),
        (
            ["predict", "run", "--data", "train", "--out", "o.npy", "--inputs-alone"],
            "leave --inputs-alone out",
        ),
        (["predict", "run", *OWN, "--data", "nothing", "--out", "o.npy"], "no dataset is called 'nothing'"),
    ],
)
def test_what_a_user_gets_wrong(
    home: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *ONE]) == 2
    assert words in capsys.readouterr().err
    assert not (home / "o.npy").exists()


def test_a_file_that_is_there_is_refused_before_anything_runs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "there.npy").write_text("precious")
    assert main(["predict", "run", "--data", "train", "--out", "there.npy", *ONE]) == 2
    assert "there.npy is there already" in capsys.readouterr().err
    assert (home / "there.npy").read_text() == "precious"


# Which task a run is of


def test_a_run_says_which_task_it_is_of(home: Path) -> None:
    known = origin(Path("run"))
    assert known.task == "mine_applied:task"
    assert known.options == {"width": 3, "data_dir": home / "some"}
    assert known.settings["batch_size"] == 10
    assert known.settings["precision_of"] == ()
    assert origin(next(Path("run/checkpoints").glob("step-*"))) == known


def test_a_task_without_a_name_has_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evener.fit(tasks.plain(), processes=1, device="cpu", steps=1, run_dir=tmp_path / "run", show=False)
    assert main(["evaluate", str(tmp_path / "run"), *ONE]) == 2
    assert "does not say which task it is of" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--task", "tests.tasks:plain", *ONE]) == 0


def strangers(home: Path, task: str, **options: object) -> str:
    """A run directory that names a function of its writer's choice."""
    path = Path(shutil.copytree(home / "run", home / "strangers", dirs_exist_ok=True))
    (path / "task.json").write_text(json.dumps({"task": task, "options": options, "paths": []}))
    return str(path)


@pytest.mark.parametrize("command", [["evaluate"], ["predict", "--data", "train", "--out", "o.npy"]])
@pytest.mark.parametrize(
    "task",
    [
        "subprocess:getoutput",
        "evener.training.builtin_tasks.digits:subprocess.getoutput",
        "mine_applied:task",
    ],
)
def test_the_function_that_a_run_names_is_not_run_for_that(
    home: Path, capsys: pytest.CaptureFixture[str], command: list[str], task: str
) -> None:
    run = strangers(home, task, cmd="touch ran")
    assert main([*command[:1], run, *command[1:], *ONE]) == 2
    words = capsys.readouterr().err
    assert repr(task) in words
    assert f"--task {task}" in words
    assert "--trust" in words
    assert not (home / "ran").exists()


def test_it_is_run_where_the_directory_is_trusted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = strangers(home, "subprocess:getoutput", cmd="touch ran")
    assert main(["evaluate", run, "--trust", *ONE]) == 2
    assert (home / "ran").exists()


def test_tasks_that_come_with_evener_are_known() -> None:
    assert is_known("digits")
    assert is_known("evener.training.builtin_tasks.digits:task")
    assert not is_known("evener.training.builtin_tasks.digits:model")


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": 3},
        {"task": ["digits"]},
        {"task": "digits", "options": 3},
        {"task": "digits", "paths": 3},
        {"task": "digits", "paths": [3]},
        {"task": "digits", "paths": ["data_dir"]},
        {"task": "digits", "options": {"data_dir": 3}, "paths": ["data_dir"]},
        {"task": "digits", "options": {"data_dir": "a\0b"}, "paths": ["data_dir"]},
    ],
    ids=str,
)
def test_a_task_of_another_form(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "task.json").write_text(json.dumps(wrong))
    with pytest.raises(DataError, match="does not say which task"):
        origin(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": "x"},
        {"dtype": []},
        {"workers": {}},
        {"workers": "auto"},
        {"precision_of": 3},
        {"seed": "a"},
    ],
    ids=str,
)
def test_settings_of_another_form(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(DataError, match="does not hold the settings"):
        origin(tmp_path)


@pytest.mark.parametrize(("workers", "most"), [(3000, os.cpu_count()), (0, 0)])
def test_a_run_starts_no_more_workers_than_there_are_cores(tmp_path: Path, workers: Any, most: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"workers": workers}))
    assert origin(tmp_path).settings["workers"] == most


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("digits", "digits"),
        (tasks.plain, "tests.tasks:plain"),
        (tasks.plain(), None),
        (lambda: tasks.plain(), None),
    ],
)
def test_the_name_of_a_task(task: Any, name: str | None) -> None:
    assert name_of(task) == name


def test_options_that_json_does_not_give_back_are_not_kept(tmp_path: Path) -> None:
    def task(width: object) -> evener.Task:
        return tasks.plain()

    task.__module__, task.__qualname__ = "tests.tasks", "task"
    evener.fit(
        task,
        options={"width": (1, 2)},
        processes=1,
        device="cpu",
        steps=1,
        run_dir=tmp_path / "run",
        show=False,
    )
    assert origin(tmp_path / "run").task is None


def test_a_directory_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no run directory"):
        origin(tmp_path)
    assert os.listdir(tmp_path) == []
