"""What counts of a run directory elsewhere, and what of it is brought here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.checkpoint.checksums import checked
from evener.checkpoint.remote.fetch import base_of, fetched, whole_in
from evener.checkpoint.remote.files import RemoteFiles
from evener.core.elsewhere import local_path
from evener.errors import ConfigurationError
from tests import elsewhere as places


@pytest.mark.parametrize(
    "name", ["../evener.json", "/tmp/rest.pt", "__0_0.distcp/../x", "a/rest.pt", "rest.pt\n", "sums.json", ""]
)
def test_a_list_names_only_files_of_a_checkpoint(name: str) -> None:
    with pytest.raises(ValueError, match="no file of a checkpoint"):
        checked({"rest.pt": [1, 2], name: [1, 2]})
    assert checked({"rest.pt": [1, 2]}) == {"rest.pt": (1, 2)}


def test_a_checkpoint_is_whole_with_its_list_and_all_files() -> None:
    for step, name, nbytes in (
        (1, "rest.pt", 3),
        (2, "rest.pt", 4),
        (3, "tensors.json", 3),
        (4, "../rest.pt", 3),
    ):
        place = f"run/checkpoints/step-0000000{step}"
        places.put(f"{place}/rest.pt", b"123")
        places.put(f"{place}/sums.json", json.dumps({name: [nbytes, 0]}).encode())
    places.put("run/checkpoints/step-00000005/rest.pt", b"123")
    places.put("run/checkpoints/step-00000006/sums.json", b'{"rest.pt": [3')
    places.put("run/other/sums.json", b"{}")
    files = RemoteFiles("memory://run")
    assert [*whole_in(files, files.sizes())] == ["checkpoints/step-00000001"]


def test_the_run_of_a_path() -> None:
    for name in ("", "checkpoints", "checkpoints/best", "checkpoints/latest", "checkpoints/step-00000004"):
        assert base_of(Path("run") / name) == Path("run")
    assert base_of(Path("lone/step-00000004")) == Path("lone")


def test_only_names_that_evener_gives_are_written_here(tmp_path: Path) -> None:
    for name in ("config.json", "x.sh", "checkpoints/latest", "checkpoints/x.sh", "step-x/sums.json", "a/b"):
        places.put(f"run/{name}", b"{}")
    here = fetched(local_path("memory://run"))
    found = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    assert {name for name in found if not name.startswith(".")} == {"config.json", "checkpoints/latest"}


def test_a_place_with_nothing_is_an_error_and_other_paths_are_left(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no run at memory://run"):
        fetched(local_path("memory://run/checkpoints/best"))
    assert not (tmp_path / "cache").exists()
    assert fetched(tmp_path / "run", checkpoint=True) == tmp_path / "run"
