"""The bar of a notebook, with a stand-in of IPython that notes what is displayed."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evener.core.records import RunStart, StepRecord
from evener.training.fit import fit
from evener.training.reporting import notebook
from evener.training.reporting.notebook import (
    NotebookTerminal,
    ProgressBar,
    ProgressFile,
    bar_html,
    notebook_bar,
)
from tests import tasks
from tests.core.test_html import Tags


class Displayed:
    """Stands for ``IPython.display``."""

    def __init__(self) -> None:
        self.made: list[dict[str, str]] = []
        self.updates: list[dict[str, str]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Displayed:
        assert raw
        assert display_id
        self.made.append(data)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.updates.append(data)

    @property
    def last(self) -> str:
        return [*self.made, *self.updates][-1]["text/plain"]


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> Displayed:
    """In a kernel."""
    found = Displayed()
    python: Any = ModuleType("IPython")
    python.get_ipython = lambda: SimpleNamespace(kernel=object())
    module: Any = ModuleType("IPython.display")
    module.display = found.display
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(notebook, "LIVE_SECONDS", 0.01)
    return found


def step(number: int) -> StepRecord:
    return StepRecord(number, 0, 0.25, samples=8, seconds=0.1, shares=(8,), lr=0.1)


def test_a_run_has_one_bar_that_ends_whole(displayed: Displayed, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tasks.plain, processes=1, device="cpu", steps=4)
    assert len(displayed.made) == 1
    assert displayed.last.startswith("step 4 of 4, epoch 1, train loss ")
    assert ", 0 samples/s" not in displayed.last
    lines = capsys.readouterr().err
    assert "parameters" in lines, "the header stays printed"
    assert "step 4 of 4" not in lines


def test_progress_travels_by_a_file(displayed: Displayed, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    shown, bar = NotebookTerminal(ProgressFile(path)), ProgressBar(path)
    shown.start(RunStart("task", {}, 1, batch_size=8, total_steps=40, steps_done=0))
    bar.refresh()
    assert not displayed.made, "no step is done"
    shown.step(step(8))
    shown.step(step(9))
    shown.end(None)
    bar.refresh()
    bar.refresh()
    assert (len(displayed.made), len(displayed.updates)) == (1, 0)
    path.write_text('{"done": ')
    bar.refresh()
    path.write_text(json.dumps({"done": 40, "total": 40, "words": "<b>"}))
    bar.refresh()
    assert displayed.updates == [{"text/plain": "<b>", "text/html": bar_html(json.loads(path.read_text()))}]


def test_the_bar_is_html_without_scripts() -> None:
    tags = Tags(bar_html({"done": 3, "total": 7, "words": "<script>"}))
    assert tags.found == ["div", "progress"]
    assert "<script>" in "".join(tags.words)
    assert Tags(bar_html({"done": 3, "total": None, "words": "step 3"})).found == ["div"]


def test_a_file_that_cannot_be_written_ends_no_run(displayed: Displayed, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = NotebookTerminal(ProgressFile(tmp_path / "file" / "progress.json"))
    shown.start(RunStart("task", {}, 1, batch_size=8, total_steps=40, steps_done=0))
    shown.step(step(9))
    shown.end(None)


def test_elsewhere_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with notebook_bar(True) as found:
        assert found is None
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    with notebook_bar(True) as found:
        assert found is None


def test_the_thread_ends_with_the_run(displayed: Displayed) -> None:
    with notebook_bar(False) as found:
        assert found is None
    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"), notebook_bar(True):
        raise ValueError("broken")
    assert threading.active_count() == before
