"""What a task is given wrongly is named when the task is made, with what to give instead."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evener.core.task.task import Task, resolve
from evener.core.task.validation import check_dataset
from evener.errors import TaskError
from evener.training.engine import Engine
from tests import tasks

PAIRS = [(row, torch.tensor(0)) for row in torch.randn(20, 6)]


class OfItems(Dataset[Any]):
    """Map-style, with what is needed and no more."""

    def __getitem__(self, index: int) -> Any:
        return PAIRS[index]

    def __len__(self) -> int:
        return len(PAIRS)


class Lazy(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(PAIRS)


@pytest.mark.parametrize("dataset", [PAIRS, tuple(PAIRS), OfItems(), Lazy(), PAIRS[:2]], ids=type)
def test_what_holds_pairs_is_a_dataset(dataset: Any) -> None:
    with Engine(tasks._task(train=dataset, evaluate=dataset), device="cpu", steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.evaluate().keys() == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (
            DataLoader(OfItems()),
            r"of type DataLoader, .*loader\.dataset.*Task\(batch_size=\.\.\., collate=\.\.\.\)",
        ),
        ({"train": PAIRS}, r"of type dict, .*one of its parts, such as dataset\['train'\]"),
        (OfItems, r"the class OfItems, .*OfItems\(\.\.\.\)"),
        (Path("data"), "Path, .*that reads it"),
        ("data.csv", "of type str, .*that reads it"),
        (None, "None, .*that reads it"),
        (torch.ones(3, 2), r"of type Tensor, .*TensorDataset\(inputs, targets\)"),
        (np.ones((3, 2)), r"of type ndarray, .*torch\.from_numpy"),
        ((torch.ones(3, 2), torch.ones(3)), r"of type tuple, .*TensorDataset\(inputs, targets\)"),
        ([np.ones((3, 2)), np.ones(3)], "of type list, .*TensorDataset"),
        (iter(PAIRS), "of type list_iterator, .*begins anew"),
        (lambda: PAIRS, "of type function, .*call it"),
        (3, "of type int, .*with __getitem__ and __len__"),
    ],
)
def test_what_is_no_dataset(dataset: Any, words: str) -> None:
    with pytest.raises(TaskError, match=f"^Task.train is .*{words}"):
        tasks._task(train=dataset)
    if dataset is not None:
        with pytest.raises(TaskError, match=r"^Task\.evaluate is "):
            tasks._task(evaluate=dataset)
    with pytest.raises(TaskError, match=r"^the dataset is "):
        check_dataset(dataset, "the dataset")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"batch_size": 0}, r"^Task.batch_size is 0; give an integer of at least 1$"),
        ({"batch_size": -3}, "batch_size is -3"),
        ({"batch_size": 1.5}, r"batch_size is 1\.5"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": True}, "batch_size is True"),
        ({"epochs": 0}, r"^Task.epochs is 0; give"),
        ({"epochs": None}, "epochs is None"),
        ({"metrics": [len]}, "metrics is of type list, not a mapping"),
        ({"metrics": {"loss": nn.L1Loss()}}, "metrics has 'loss', which is the name of Task.loss"),
        ({"metrics": {"mse": nn.MSELoss}}, r"metrics\['mse'\] is the class MSELoss; .*MSELoss\(\.\.\.\)"),
        ({"loss": nn.MSELoss}, r"loss is the class MSELoss; give an object of it: MSELoss\(\)"),
        ({"scheduler": 3}, "scheduler is of type int, not a function; give a function from an optimizer"),
        ({"collate": "pad"}, "collate is of type str"),
        ({"penalty": 0.1}, "penalty is of type float, not a function; give a function from the model to one"),
        ({"forward": None}, "forward is None, not a function; give a function from the model and inputs"),
        ({"modle": nn.Linear}, r"^Task has no field modle; did you mean model\?$"),
        ({"xyzzy": 1}, "^Task has no field xyzzy; its fields are model, loss, optimizer, train, evaluate"),
    ],
)
def test_parts_of_a_wrong_kind(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        tasks._task(**parts)


def test_fields_that_are_missing_or_given_twice() -> None:
    with pytest.raises(TaskError, match="missing a required argument: 'loss'; its fields are model, loss"):
        Task(model=lambda: nn.Linear(1, 1))  # type: ignore[call-arg]
    with pytest.raises(TaskError, match="multiple values for argument 'model'"):
        Task(nn.Linear, model=nn.Linear)  # type: ignore[call-arg,misc]


def test_a_task_is_a_dataclass_as_ever() -> None:
    task = dataclasses.replace(tasks.plain(), batch_size=np.int64(7))
    assert type(task.batch_size) is int
    with pytest.raises(TaskError, match="did you mean epochs"):
        dataclasses.replace(task, epoch=3)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.batch_size = 3  # type: ignore[misc]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_tasks_function_that_asks_for_a_gpu_is_told_to_leave_it() -> None:
    def mine() -> Task:
        return tasks._task(loss=nn.CrossEntropyLoss(weight=torch.ones(3).cuda()))

    with pytest.raises(TaskError, match=r"the function of task 'mine' asks for a device.*remove \.cuda\(\)"):
        resolve(mine)()


class WithPlace(Lazy):
    """Goes on where it was."""

    def __init__(self, lock: Any = None) -> None:
        self.at, self.lock = 0, lock

    def __iter__(self) -> Any:
        for at in range(self.at, len(PAIRS)):
            self.at = at + 1
            yield PAIRS[at]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_that_is_trained_on_and_evaluated_has_two_places() -> None:
    stream = WithPlace()
    task = dataclasses.replace(tasks.plain(), train=stream, evaluate=stream)
    assert task.train is stream
    assert task.evaluate is not stream
    assert dataclasses.replace(task).evaluate is task.evaluate
    lazy = Lazy()
    assert dataclasses.replace(task, train=lazy, evaluate=lazy).evaluate is lazy
    locked = WithPlace(threading.Lock())
    with pytest.raises(TaskError, match=r"keeps its place and cannot be copied .*another object"):
        dataclasses.replace(task, train=locked, evaluate=locked)
