"""Datasets that a command names, and files of predictions."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evener.core.types import Tree
from evener.errors import ConfigurationError, DataError, StorageError
from evener.training.prediction_files import (
    Rows,
    check_out,
    dataset_called,
    has_inputs_alone,
    shapes,
    write_outputs,
)
from tests import tasks

NUMBERS = torch.tensor([[0.1, 2.0], [1e-8, float("inf")], [3.0, -1 / 3]])
SEVERAL = {"a": NUMBERS, "b": (torch.arange(3), {"c": torch.tensor([True, False, True])})}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_array() -> None:
    write_outputs(Path("new/out.npy"), NUMBERS)
    assert torch.equal(torch.from_numpy(np.load("new/out.npy")), NUMBERS)
    write_outputs(Path("half.npy"), NUMBERS.bfloat16())
    assert torch.equal(torch.from_numpy(np.load("half.npy")), NUMBERS.bfloat16().float())


def test_arrays_by_name() -> None:
    write_outputs(Path("out.npz"), SEVERAL)
    with np.load("out.npz") as found:
        assert sorted(found.files) == ["a", "b.0", "b.1.c"]
        assert found["b.1.c"].tolist() == [True, False, True]
    # As arguments of np.savez are called.
    write_outputs(Path("own.npz"), {"file": NUMBERS, "allow_pickle": NUMBERS})
    with np.load("own.npz") as found:
        assert sorted(found.files) == ["allow_pickle", "file"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_columns_give_back_the_numbers(dtype: torch.dtype) -> None:
    numbers = torch.tensor([[1, 2], [3, 4], [5, 6]]).to(dtype) / (7 if dtype.is_floating_point else 1)
    write_outputs(Path("out.csv"), {"x": numbers.to(dtype), "y": torch.arange(3)})
    with Path("out.csv").open(newline="") as file:
        head, *rows = list(csv.reader(file))
    assert head == ["x_0", "x_1", "y"]
    back = torch.tensor([[float(value) for value in row[:2]] for row in rows], dtype=torch.float64)
    assert torch.equal(back.to(dtype), numbers.to(dtype))
    assert [row[2] for row in rows] == ["0", "1", "2"]


def test_anything() -> None:
    ragged = [torch.zeros(2), "text", None]
    write_outputs(Path("out.pt"), ragged)
    assert torch.equal(torch.load("out.pt", weights_only=True)[0], ragged[0])
    assert shapes(ragged) == "outputs that are not all tensors"
    assert shapes(SEVERAL) == "a (3, 2), b.0 (3,), b.1.c (3,)"


@pytest.mark.parametrize(
    ("name", "outputs", "words"),
    [
        ("out.npy", SEVERAL, r"3 outputs \(a, b.0, b.1.c\), and a .npy file holds one: --out FILE.npz"),
        ("out.npz", ["text"], "hold a str, which a .npz file cannot: --out FILE.pt can"),
        ("out.csv", torch.zeros(2, 3, 4), r"shape \(2, 3, 4\)"),
        ("out.csv", {"a": torch.zeros(2), "b": torch.zeros(3)}, r"a 2, b 3"),
    ],
)
def test_what_does_not_fit_leaves_the_file_as_it_was(name: str, outputs: Tree, words: str) -> None:
    Path(name).write_text("before")
    with pytest.raises(ConfigurationError, match=words):
        write_outputs(Path(name), outputs)
    assert Path(name).read_text() == "before"
    assert [path.name for path in Path().iterdir()] == [name]


def test_an_interruption_leaves_no_half_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(value: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_outputs(Path("out.pt"), NUMBERS)
    assert not list(Path().iterdir())


def test_a_directory_that_cannot_be_written_to_is_named() -> None:
    Path("file").touch()
    with pytest.raises(StorageError, match=r"cannot be written to file/out\.npy"):
        write_outputs(Path("file/out.npy"), NUMBERS)


def test_a_file_that_is_there_stays_unless_asked() -> None:
    Path("out.npy").touch()
    with pytest.raises(ConfigurationError, match="is there already"):
        check_out(Path("out.npy"), overwrite=False)
    check_out(Path("out.npy"), overwrite=True)
    with pytest.raises(ConfigurationError, match=r"ends with none of \.npy, \.npz, \.csv, \.pt"):
        check_out(Path("out.txt"), overwrite=False)


# In


def items(name: str) -> list[Any]:
    dataset = dataset_called(name, tasks.plain())
    return [dataset[index] for index in range(len(dataset))]  # type: ignore[arg-type]


def test_rows_of_files_are_inputs() -> None:
    np.save("in.npy", NUMBERS.numpy())
    np.savez("in.npz", x=NUMBERS.numpy(), y=np.arange(3))
    torch.save((NUMBERS, torch.arange(3)), "in.pt")
    assert torch.equal(torch.stack(items("in.npy")), NUMBERS)
    assert [int(item["y"]) for item in items("in.npz")] == [0, 1, 2]
    assert torch.equal(items("in.pt")[1][0], NUMBERS[1])
    assert has_inputs_alone("in.npy")
    assert not has_inputs_alone("tests.tasks:plain")


def test_datasets_of_the_task_and_of_modules() -> None:
    assert items("train")[0][0].shape == (6,)
    (Path("named_data.py")).write_text("ready = [(1, 2)]\ndef made():\n    return [(3, 4), (5, 6)]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path.cwd()))
        assert items("named_data:ready") == [(1, 2)]
        assert items("named_data:made") == [(3, 4), (5, 6)]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("absent.npy", ConfigurationError, "there are no data at absent.npy"),
        ("wrong.npy", DataError, r"wrong\.npy cannot be read as \.npy"),
        ("uneven.pt", DataError, r"tensors of \[2, 3\] rows"),
        ("texts.pt", DataError, "holds a str without rows"),
        ("evaluat", ConfigurationError, "no dataset is called 'evaluat'.*Did you mean evaluate"),
        ("tests.tasks:SAMPLES", ConfigurationError, "of type int, not a dataset"),
    ],
)
def test_what_is_no_dataset_is_named(name: str, error: type[Exception], words: str) -> None:
    Path("wrong.npy").write_text("no array")
    torch.save([torch.zeros(2), torch.zeros(3)], "uneven.pt")
    torch.save({"a": "text"}, "texts.pt")
    with pytest.raises(error, match=words):
        dataset_called(name, tasks.plain())


def test_a_task_without_the_dataset_is_named() -> None:
    with pytest.raises(ConfigurationError, match="has no dataset `evaluate`"):
        dataset_called("evaluate", replace(tasks.plain(), evaluate=None))


def test_rows_of_nothing() -> None:
    with pytest.raises(DataError, match=r"tensors of \[\] rows"):
        Rows({}, "x.npz")


def test_an_item_has_the_rows_of_all() -> None:
    item: dict[str, Tensor] = Rows({"a": NUMBERS, "b": torch.arange(3)}, "x.npz")[2]
    assert item["b"] == 2
    assert torch.equal(item["a"], NUMBERS[2])
