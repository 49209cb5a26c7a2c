from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from evener.core.task.task import Task, call_model, resolve
from evener.errors import DataError, LossError, TaskError
from evener.training.builtin_tasks import BUILT_IN
from evener.training.engine import Engine
from tests import tasks

HERE = "tests.tasks"


def with_options(width: int, depth: int = 1) -> Task:
    return tasks._task(name=f"{width}x{depth}")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("digit", "no task is called 'digit'; known are digits, mnist, shakespeare, or name your own"),
        ("", "no task is called ''"),
        (":plain", "no task is called"),
        ("tests.tasks:", "no task is called"),
        ("tests.tasks:not a name", "no task is called"),
        ("nowhere.at.all:task", "there is no module 'nowhere'"),
        ("tests.nothing:task", "there is no module 'tests.nothing'"),
        (f"{HERE}:plane", "has no plane; of this kind it has .*plain"),
        (f"{HERE}:SAMPLES", "SAMPLES of module tests.tasks is of type int, not a function"),
    ],
)
def test_a_task_that_is_not_there(task: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        resolve(task, BUILT_IN)


@pytest.mark.parametrize("built", [f"{HERE}:not_a_task", lambda: None])
def test_what_is_built_must_be_a_task(built: Any) -> None:
    with pytest.raises(TaskError, match=r"returned (of type int|None); it must return an evener.Task"):
        resolve(built)()


def test_a_task_by_function_name_or_as_it_is() -> None:
    task = tasks.plain()
    assert resolve(task)() is task
    assert resolve(f"{HERE}:plain")().name == resolve(tasks.plain)().name == "plain"
    assert resolve("short", {"short": f"{HERE}:plain"})().name == "plain"


def test_options_are_checked_before_anything_is_built() -> None:
    assert resolve(with_options, options={"width": 3})().name == "3x1"
    for options, words in (
        ({}, "missing a required argument: 'width'"),
        ({"widht": 3}, "with the options widht"),
    ):
        with pytest.raises(TaskError, match=words):
            resolve(with_options, options=options)
    with pytest.raises(TaskError, match="built already takes no options, but got width"):
        resolve(tasks.plain(), options={"width": 3})


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_tasks_that_come_with_evener_exist(name: str) -> None:
    resolve(name, BUILT_IN)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": nn.Linear(6, 3)}, "built Linear, not a function; give the function that builds it"),
        ({"model": None}, "Task.model is None, not a function"),
        ({"optimizer": "adam"}, "Task.optimizer is of type str, not a function"),
        ({"scheduler_interval": "epochs"}, "'epochs', not 'epoch' or 'step'"),
    ],
)
def test_parts_of_a_wrong_kind(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        tasks._task(**parts)


def test_a_loss_without_a_count_gets_the_lines_that_fix_it() -> None:
    with pytest.raises(LossError) as caught:
        tasks.no_count().exact_loss()
    assert "count=lambda targets" in str(caught.value)
    assert "total=lambda outputs, targets" in str(caught.value)


class Recording(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_how_inputs_become_arguments() -> None:
    one, other = torch.ones(1), torch.zeros(1)
    model = Recording()
    assert call_model(model, one) == ((one,), {})
    assert call_model(model, (one, [other])) == ((one, [other]), {})
    assert call_model(model, {"x": one, "y": {"z": other}}) == ((), {"x": one, "y": {"z": other}})


def test_a_task_may_replace_the_call() -> None:
    calls = []

    def forward(model: nn.Module, inputs: Any) -> Any:
        calls.append(len(inputs))
        return model(inputs * 2)

    with Engine(tasks._task(forward=forward), device="cpu", steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
    assert calls == [13]


class Heads(nn.Linear):
    """Keyword inputs and an object of outputs, as Hugging Face's models have them."""

    def forward(self, x: Any, mask: Any = None) -> Any:  # type: ignore[override]
        return {"hidden": x, "logits": super().forward(x)}


def weights(task: Task, **settings: Any) -> list[torch.Tensor]:
    with Engine(task, device="cpu", steps=3, **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return [p.detach().clone() for p in engine.model.parameters()]


def labelled(**parts: Any) -> Task:
    """The data of ``tests.tasks`` as dicts with ``labels``."""
    pairs = list(tasks.plain().train)  # type: ignore[call-overload]
    items = [{"x": inputs, "mask": None, "labels": target} for inputs, target in pairs]
    logits = lambda model, inputs: call_model(model, inputs)["logits"]  # noqa: E731
    usual = {"model": lambda: Heads(6, 3), "train": items, "evaluate": items, "forward": logits}
    return tasks._task(**(usual | parts))


def collated(items: list[Any]) -> Any:
    return {
        "x": torch.stack([item["x"] for item in items]),
        "labels": torch.stack([item["labels"] for item in items]),
    }


@pytest.mark.parametrize("collate", [None, collated])
def test_items_with_labels_train_as_pairs_do(collate: Any) -> None:
    expected = weights(tasks._task(model=lambda: nn.Linear(6, 3)))
    assert all(map(torch.equal, weights(labelled(collate=collate)), expected))


def test_outputs_of_which_the_task_chooses_none_get_the_line_that_does() -> None:
    with pytest.raises(
        LossError, match=r"cross_entropy needs one tensor.*a dict with hidden, logits"
    ) as caught:
        weights(labelled(forward=call_model))
    assert "evener.call_model(model, inputs)['logits']" in str(caught.value)


def test_targets_that_are_strings_are_refused() -> None:
    items = [(inputs, "cat") for inputs, _ in tasks.plain().train]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="the targets are strings, such as 'cat'"):
        weights(tasks._task(train=items))


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    task = dataclasses.replace(tasks.plain(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="loop of your own"):
        Engine(task, device="cpu")
