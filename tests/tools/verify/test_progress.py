from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evener.tools.verify import verification, verify
from evener.tools.verify.progress import VerificationProgress
from evener.training.reporting.notebook import ProgressFile
from tests import tasks


def test_the_runs_of_a_verification_make_one_bar(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    progress, told = VerificationProgress(ProgressFile(path), runs=2, steps=10), list[Any]()
    for where in ("on one device", "on 2 ranks", "on one device"):
        run = progress.next_run(where)
        for done in range(1, 11):
            run(done)
        told.append(json.loads(path.read_text()))
    assert told == [
        {"done": 10, "total": 20, "words": "run 1 of 2, on one device: step 10 of 10"},
        {"done": 20, "total": 20, "words": "run 2 of 2, on 2 ranks: step 10 of 10"},
        {"done": 30, "total": 30, "words": "run 3 of 3, on one device: step 10 of 10"},
    ]


def test_without_a_bar_nothing_is_told() -> None:
    VerificationProgress(None, runs=2, steps=10).next_run("on one device")(10)


@pytest.mark.usefixtures("warm")
def test_a_verification_in_a_notebook_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress.json"

    @contextmanager
    def drawn() -> Iterator[ProgressFile]:
        yield ProgressFile(path)

    monkeypatch.setattr(verification, "drawn_progress", drawn)
    assert verify(tasks.plain, processes=2, balance="3,1", steps=2, device="cpu").passed
    assert json.loads(path.read_text()) == {
        "done": 10,
        "total": 10,
        "words": "run 5 of 5, on 2 ranks: step 2 of 2",
    }
