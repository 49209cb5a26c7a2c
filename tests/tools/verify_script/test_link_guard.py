"""What a script writes in its workplace does not reach the user's files, however large they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import evener.files
from evener.tools.verify_script import workplace as workplaces
from evener.tools.verify_script.link_guard import links_guarded
from evener.tools.verify_script.workplace import workplace
from tests.warm import alone_in


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose files and directories are all too large to be copied."""
    monkeypatch.setattr(workplaces, "_MOST_FILES", 1)
    monkeypatch.setattr(workplaces, "_MOST_BYTES", 3)
    home = alone_in(tmp_path) / "experiment"
    (home / "many" / "inner").mkdir(parents=True)
    (home / "many" / "model.pt").write_text("mine")
    (home / "many" / "inner" / "model.pt").write_text("mine")
    (home / "model.pt").write_text("mine")
    (home.parent / "log").write_text("mine")
    monkeypatch.chdir(home)
    return home


def content(home: Path) -> dict[str, str]:
    files = [path for path in home.parent.rglob("*") if path.is_file()]
    return {str(path.relative_to(home.parent)): path.read_text() for path in files}


def evener_text(path: str) -> None:
    evener.files.replace_text(Path(path), "other", follow=True)


def in_directory(path: str) -> None:
    os.chdir(Path(path).parent)
    Path(Path(path).name).write_text("other")


@pytest.mark.parametrize("path", ["model.pt", "many/model.pt", "many/inner/model.pt", "many/new", "../log"])
@pytest.mark.parametrize(
    "write",
    [
        lambda path: Path(path).write_text("other"),
        lambda path: open(path, "ab").close(),
        lambda path: torch.save({"a": torch.ones(2)}, path),
        lambda path: torch.save(f=Path(path), obj=1),
        lambda path: safetensors.torch.save_file({"a": torch.ones(2)}, path),
        lambda path: np.ones(3).tofile(path),
        evener_text,
        in_directory,
    ],
)
def test_what_is_written_stays_in_the_workplace(
    write: Callable[[str], object], path: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(here)
    with workplace() as place:
        monkeypatch.chdir(place)
        with links_guarded(place):
            write(path)
            monkeypatch.chdir(place)
            assert Path(path).is_file()
        monkeypatch.chdir(here)
    assert content(here) == before


def test_what_is_removed_or_renamed_is_a_link(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(here)
    with workplace() as place:
        monkeypatch.chdir(place)
        with links_guarded(place):
            os.rename("many/model.pt", "many/older.pt")
            Path("many/inner/model.pt").unlink()
            assert sorted(os.listdir("many")) == ["inner", "older.pt"]
            assert os.listdir("many/inner") == []
            shutil.rmtree("many")
            assert not Path("many").exists()
        monkeypatch.chdir(here)
    assert content(here) == before


def test_what_is_appended_to_or_read_has_its_content(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with workplace() as place:
        monkeypatch.chdir(place)
        with links_guarded(place):
            assert Path("many/model.pt").read_text() == "mine"
            assert Path("many").is_symlink()
            with open("model.pt", "a") as file:
                file.write(" and more")
            Path("latest").symlink_to("model.pt")
            Path("latest").write_text("of the script's own link")
        assert Path("model.pt").read_text() == "of the script's own link"
        monkeypatch.chdir(here)
    assert Path("model.pt").read_text() == "mine"
