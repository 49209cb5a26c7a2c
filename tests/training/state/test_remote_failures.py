"""Runs elsewhere whose files are damaged, whose uploads fail, or that are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import evener
from evener.checkpoint import weights_digest
from evener.checkpoint.remote.lock import LOCK
from evener.checkpoint.weights_file import read_weights
from evener.core.elsewhere import host_name, local_path
from evener.errors import ConfigurationError, DataError, StorageError
from evener.training.engine import Engine
from evener.training.fit import fit
from tests import elsewhere as places
from tests import tasks
from tests.elsewhere import memory
from tests.ranks import fork_of_imports
from tests.training.state.test_remote_run import LOCAL, URL, digest, failing, forget_here, notes, run, trained

__all__ = ["memory", "run"]


def damaged(run: str, change: Callable[[dict[str, Any]], Any]) -> None:
    path = f"{run}/sums.json"
    found = json.loads(places.content()[path])
    change(found)
    places.put(path, json.dumps(found).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda sums: sums.update({"../../../../escaped": [3, 0]}),
        lambda sums: sums.update({"/tmp/escaped": [3, 0]}),
        lambda sums: sums.update({"rest.pt": [sums["rest.pt"][0] + 1, 0]}),
        lambda sums: sums.update({"rest.pt": [-1, 0]}),
        lambda sums: sums.update({"__9_9.distcp": [10, 0]}),
    ],
    ids=["escaping", "absolute", "length", "negative", "lacking"],
)
def test_a_checkpoint_that_is_not_as_its_list_says_is_passed_over(run: Path, change: Any) -> None:
    places.put("escaped", b"123")
    damaged("run/checkpoints/step-00000008", change)
    trained(resume=URL, run_dir=run / "local")
    records = (run / "local/records.jsonl").read_text()
    assert "goes on after step 6 of memory://run" in records
    assert not list(run.rglob("escaped"))


def test_a_checkpoint_with_other_content_is_found_out(run: Path) -> None:
    name = "run/checkpoints/step-00000008/rest.pt"
    places.put(name, places.content()[name][:-1] + b"?")
    with pytest.raises(DataError, match=r"rest.pt is not what was written"):
        fit(tasks.plain, processes=1, show=False, resume=f"{URL}/checkpoints/step-00000008")
    with pytest.warns(UserWarning, match="step-00000008 cannot be read"):
        read_weights(local_path(URL))


# Failures


def test_a_run_goes_on_without_what_cannot_be_uploaded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload of step 4 fails; that of step 6 is whole."""
    failed = failing("put_file", monkeypatch, "step-00000004/rest.pt")
    found = trained()
    assert found.summary.steps == 8
    assert len(failed) == 3
    assert places.steps() == [6, 8]
    wrong = "step-00000004, or what is beside it, is not whole in memory://run: rank 0 could not upload it: the network"
    assert [text for text in notes() if "not whole" in text] == [f"{wrong} is gone; the run goes on"]
    assert not [name for name in places.content() if "step-00000004" in name]


def test_a_run_that_could_not_upload_its_end_is_an_error_and_goes_on_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digest(run_dir=None)
    with monkeypatch.context() as patch:
        failing("put_file", patch, "step-00000008")
        with pytest.raises(
            StorageError, match=r"does not have all of the run: its last checkpoint could not"
        ) as error:
            trained()
        assert "--resume memory://run uploads it" in str(error.value)
        assert error.value.exit_status == 1
    assert places.steps() == [4, 6]
    assert "run/summary.json" in places.content()
    assert "step-00000006" in places.content()["run/checkpoints/latest"].decode()
    cache = shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    assert digest(resume="auto") == whole
    assert places.steps() == [6, 8]
    assert LOCK not in "".join(places.content())
    # Another run has begun elsewhere: what was not uploaded is kept.
    trained(overwrite=True, steps=2, seed=1)
    forget_here(tmp_path)
    cache.rename(tmp_path / "cache")
    trained(resume="auto", steps=4, seed=1)
    (aside,) = (tmp_path / "cache/evener/not-uploaded").iterdir()
    assert digest(run_dir=aside, resume="auto") == whole


def test_a_file_that_arrives_in_part_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryFileSystem.put_file

    def put_file(self: Any, lpath: str, rpath: str, **known: Any) -> None:
        if rpath.endswith("step-00000004/rest.pt"):
            places.put(rpath, Path(lpath).read_bytes()[:-1])
        else:
            whole(self, lpath, rpath, **known)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    trained(steps=5, save_every=2, keep=9)
    assert places.steps() == [2, 5]
    assert any("step-00000004/rest.pt has" in text for text in notes())


def test_records_that_were_not_uploaded_are_uploaded_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint, which is whole, is left as it is."""
    sent: list[str] = []
    whole = MemoryFileSystem.put_file

    def put_file(self: Any, lpath: str, rpath: str, **known: Any) -> None:
        sent.append(rpath)
        if rpath.endswith("records.jsonl") and len([path for path in sent if path == rpath]) <= 12:
            raise OSError("the network is gone")
        whole(self, lpath, rpath, **known)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    trained()
    assert places.steps() == [6, 8]
    assert len([path for path in sent if path.endswith("step-00000008/rest.pt")]) == 1
    assert b'"step": 7' in places.content()["run/records.jsonl"]


def test_a_run_is_refused_before_it_begins_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing("pipe_file", monkeypatch)
    with pytest.raises(ConfigurationError, match=r"memory://run cannot hold a run: .*the network is gone"):
        trained()
    with pytest.raises(ConfigurationError, match=r"nowhere://b/run cannot be opened"):
        trained(run_dir="nowhere://b/run")
    with pytest.raises(ConfigurationError, match=r"nowhere://b/run cannot be opened"):
        trained(run_dir=None, resume="nowhere://b/run")


def test_two_runs_do_not_write_there_at_once(tmp_path: Path) -> None:
    class Another(evener.Callback):
        def begin(self, engine: Any) -> None:
            with pytest.raises(ConfigurationError, match="another run on this host writes to memory://run"):
                trained(overwrite=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another host"))
                with pytest.raises(ConfigurationError, match=r"another run writes to memory://run \(process"):
                    trained(overwrite=True)

    fit(tasks.plain, processes=1, device="cpu", steps=2, run_dir=URL, show=False, callback=Another())  # type: ignore[arg-type]
    assert places.steps() == [2]


def test_a_run_whose_lock_was_taken_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # A renewal that had just read the lock would write it again: then the other run is the one that lost it.
    monkeypatch.setattr("evener.checkpoint.remote.lock.BEAT_SECONDS", 1000.0)

    class Thief(evener.Callback):
        def begin(self, engine: Any) -> None:
            places.put(f"run/{LOCK}", b'{"token": "t", "pid": 1, "host": "far"}')

    settings: dict[str, Any] = {"processes": 1, "device": "cpu", "steps": 2, "run_dir": URL, "show": False}
    with pytest.raises(
        StorageError, match=r"the lock of memory://run was taken by another run .process 1 on far"
    ):
        fit(tasks.plain, callback=Thief(), **settings)
    assert places.steps() == []


def test_an_engine_saves_to_local_directories_alone() -> None:
    with Engine(tasks.plain(), device="cpu", steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        with pytest.raises(ConfigurationError, match="memory://run is no local directory"):
            engine.save("memory://run")  # type: ignore[arg-type]


def test_an_engine_loads_from_elsewhere(run: Path) -> None:
    with Engine(tasks.plain(), device="cpu", dtype="float64", steps=8) as engine:
        engine.load(URL)  # type: ignore[arg-type]
        assert engine.steps_done == 8
        assert (
            weights_digest(engine.model) == json.loads(places.content()["run/summary.json"])["weights_digest"]
        )


# Killed


def _train_slowly(url: str, cache: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    places.register()
    trained(run_dir=url, save_mode="async")


@pytest.mark.parametrize("here", [True, False], ids=["here", "on another host"])
def test_a_run_that_is_killed_while_it_uploads_goes_on_from_the_last_whole_checkpoint(
    here: bool, tmp_path: Path
) -> None:
    """It is killed when a part of step 4 is there. On its own host, all of step 4 is in its local directory."""
    places.register()
    there, url = tmp_path / "there/run", f"slow://{tmp_path}/there/run"
    process = fork_of_imports(_train_slowly, url, str(tmp_path / "cache"))
    part = there / "checkpoints/step-00000004/__0_0.distcp"
    until = time.monotonic() + 60
    while not (part.is_file() and part.stat().st_size):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (part.parent / "sums.json").exists()
    assert (there / LOCK).exists()
    if not here:
        forget_here(tmp_path)
    url = f"file://{there}"  # the same place, and quick
    if here:
        slow, quick = (tmp_path / "cache" / LOCAL / host_name() / kind for kind in ("slow:", "file:"))
        slow.rename(quick)
    assert digest(run_dir=url, resume="auto") == digest(run_dir=None)
    records = (there / "records.jsonl").read_text()
    assert f"goes on after step {4 if here else 2} of file://" in records
    assert sorted(path.parent.name for path in there.glob("checkpoints/*/sums.json")) == [
        "step-00000006",
        "step-00000008",
    ]
    assert not (there / LOCK).exists()
