from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evener.training.engine import Engine
from tests import tasks


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("written")
    with Engine(tasks.plain(), device="cpu", dtype="float64", steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        engine.save(place)
    return place / "step-00000001"


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "checkpoints" / "step-00000001")
