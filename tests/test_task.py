from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from evener.engine import Engine
from evener.errors import LossError, TaskError
from evener.task import Task, call_model, resolve
from evener.tasks import BUILT_IN
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
        ("nowhere.at.all:task", "there is no module 'nowhere'"),
        ("tests.nothing:task", "there is no module 'tests.nothing'"),
        (f"{HERE}:plane", "has no function plane; its functions are: .*plain"),
        (f"{HERE}:SAMPLES", "a int, not a function, called SAMPLES"),
    ],
)
def test_a_task_that_is_not_there(task: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        resolve(task, BUILT_IN)


def test_an_import_that_fails_inside_the_users_module_is_shown_as_it_is(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_something.py").write_text("import something_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_missing"):
        resolve("needs_something:task")


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


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    task = dataclasses.replace(tasks.plain(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="loop of your own"):
        Engine(task, device="cpu")
