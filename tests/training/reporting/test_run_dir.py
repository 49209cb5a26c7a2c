from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evener.checkpoint.run_mark import write_mark
from evener.core.records import Note, RunStart
from evener.data.shard_counts import COUNTS
from evener.data.sharded import ShardedDataset
from evener.distributed.launch.scratch_dir import clear, scratch
from evener.errors import ConfigurationError, DataError, DivergenceError, StorageError, TaskError
from evener.files import write_json
from evener.training.fit import fit
from evener.training.reporting import run_dir as run_dir_module
from evener.training.reporting.run_dir import Records, RunDirectory, goes_on_in, new_run_dir, refuse_finished
from tests import tasks

ANEW: dict[str, Any] = {"overwrite": True}
ONE: dict[str, Any] = {"processes": 1, "device": "cpu", "show": False}


def test_the_name_of_a_run_directory(tmp_path: Path) -> None:
    assert new_run_dir("my.package:task", 0.0, tmp_path).name.startswith("my-package-task-19")


def test_runs_that_start_in_one_second_have_directories_of_their_own(tmp_path: Path) -> None:
    first, second, third = (new_run_dir("digits", 0.0, tmp_path) for _ in range(3))
    assert len({first, second, third}) == 3
    assert second.name == f"{first.name}-2"
    assert all(path.is_dir() for path in (first, second, third))


def test_a_directory_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        with pytest.raises(ConfigurationError, match=r"another run writes to .*process \d+ on .*--run-dir"):
            fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, show=False)
        assert not (tmp_path / "records.jsonl").exists()
    with RunDirectory(tmp_path):
        pass


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot hold a run"), RunDirectory(tmp_path / "file"):
        pass


def test_what_an_earlier_run_left_stays_until_the_new_one_has_begun(tmp_path: Path) -> None:
    fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, steps=2, show=False)
    before = (tmp_path / "records.jsonl").read_text(), (tmp_path / "config.json").read_text()
    with pytest.raises(Exception, match="no checkpoint at"):
        fit(
            tasks.plain,
            processes=1,
            device="cpu",
            run_dir=tmp_path,
            resume=tmp_path / "no",
            show=False,
            **ANEW,
        )
    assert ((tmp_path / "records.jsonl").read_text(), (tmp_path / "config.json").read_text()) == before
    fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, steps=1, show=False, overwrite=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert steps == [0, 1]  # a step, and the evaluation after it


def test_a_run_that_ended_while_it_counted_may_begin_again(tmp_path: Path) -> None:
    def torn(shard: int) -> Iterator[Any]:
        yield from tasks.rows_of(shard)
        if shard == 5:
            raise OSError("a torn file")

    task, folder = tasks.sharded(), tmp_path / "run"
    with pytest.raises(DataError, match="a torn file"):
        fit(replace(task, train=ShardedDataset(range(6), torn)), run_dir=folder, **ONE)
    assert (folder / COUNTS).is_file()
    fit(task, run_dir=folder, steps=1, **ONE)
    (tmp_path / COUNTS).write_text('{"mine": "not lengths"}')
    with pytest.raises(ConfigurationError, match=f"has {COUNTS}, which the run would replace"):
        fit(task, run_dir=tmp_path, steps=1, **ONE)


def test_a_summary_is_never_that_of_an_earlier_run(tmp_path: Path) -> None:
    fit(tasks.plain, processes=1, device="cpu", run_dir=tmp_path, steps=1, show=False)
    assert (tmp_path / "summary.json").exists()
    with pytest.raises(DivergenceError):
        fit(tasks.one_bad_target, processes=1, device="cpu", run_dir=tmp_path, show=False, **ANEW)
    assert not (tmp_path / "summary.json").exists()


def state_of(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_finished_run_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    fit(tasks.plain, run_dir=tmp_path, steps=3, **ONE)
    before = state_of(tmp_path)
    with pytest.raises(ConfigurationError, match=r"holds a finished run: .*--run-dir.*--resume.*--overwrite"):
        fit(tasks.plain, run_dir=tmp_path, steps=1, **ONE)
    with pytest.raises(ConfigurationError, match="holds a finished run"), RunDirectory(tmp_path):
        pass
    assert state_of(tmp_path) == before
    fit(tasks.plain, run_dir=tmp_path, steps=5, resume=tmp_path, **ONE)
    fit(tasks.plain, run_dir=tmp_path, steps=1, **ONE, **ANEW)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"strategy": "nonsense"}, "no strategy is called 'nonsense'"),
        ({"resume": "nothing"}, "no checkpoint at .*nothing"),
        ({"weights": "nothing.pt"}, "nothing.pt"),
        ({"options": {"nothing": 3}}, "with the options nothing"),
        ({"balance": "nonsense"}, "shares 'nonsense'"),
        ({"device": "nonsense"}, "nonsense"),
        ({}, "holds a finished run"),
    ],
    ids=lambda value: "+".join(value) or "nothing" if isinstance(value, dict) else "",
)
def test_what_is_wrong_in_any_directory_is_said_before_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], words: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(tmp_path)
    write_mark(run, {"run": "finished"})
    write_json(run / "summary.json", {"interrupted": False})
    before = state_of(run)
    with pytest.raises((ConfigurationError, TaskError), match=words):
        fit(tasks.plain, run_dir=run, **(ONE | wrong))
    assert state_of(run) == before


def test_what_is_finished(tmp_path: Path) -> None:
    refuse_finished(tmp_path)
    write_json(tmp_path / "summary.json", {"interrupted": True})
    refuse_finished(tmp_path)
    for content in ('{"interrupted": false}', "{}", "no json", "[]"):
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(ConfigurationError, match="finished"):
            refuse_finished(tmp_path)


def test_which_run_goes_on_in_its_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    inside = (run, run / "checkpoints" / "step-00000001", tmp_path / "x" / ".." / "run", Path("auto"))
    assert all(goes_on_in(run, resume) for resume in inside)
    assert not any(goes_on_in(run, resume) for resume in (None, tmp_path, tmp_path / "run2"))


def test_a_run_that_begins_anew_removes_checkpoints_of_an_earlier_one_only_if_asked(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000099"
    checkpoint.mkdir(parents=True)
    write_mark(checkpoint, {"run": "earlier", "steps": 99, "history": []})
    (tmp_path / "records.jsonl").write_text('{"kind": "step", "step": 0}\n')
    for goes_on, replaces in ((True, True), (True, False), (False, False), (False, True)):
        records = Records(tmp_path, goes_on, replaces=replaces)
        records.start(RunStart("task", {}, 1, 4, 9, steps_done=1))
        records.end(None)
        assert checkpoint.exists() is (goes_on or not replaces)
        assert len((tmp_path / "records.jsonl").read_text()) == 28 * goes_on


@pytest.mark.parametrize("marked", [False, True])
def test_files_of_the_user_s_with_names_like_ours_stay(tmp_path: Path, marked: bool) -> None:
    if marked:
        write_mark(tmp_path, {"run": "this", "launch": ""})
    mine = [".owner"] if marked else [".owner", ".evener-owner"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    with RunDirectory(tmp_path):
        assert marked == (tmp_path / ".evener-owner").read_text().startswith("process ")
    assert {name: (tmp_path / name).read_text() for name in mine} == dict.fromkeys(mine, "mine")
    assert (tmp_path / ".evener-owner").exists() != marked


def test_the_owner_of_a_run_that_died_before_its_mark_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".evener-owner").write_text("process 4711 on elsewhere\n")
    with RunDirectory(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / ".evener-owner").read_text()
    assert not (tmp_path / ".evener-owner").exists()


def test_what_a_writer_that_was_killed_left_is_removed(tmp_path: Path) -> None:
    write_mark(tmp_path, {"run": "this", "launch": ""})
    (tmp_path / ".summary.json.4711").write_text("{")
    (tmp_path / ".records.jsonl.4711").write_text("{")
    (tmp_path / ".settings.json.bak").write_text("the user's")
    (tmp_path / ".summary.json.bak").write_text("the user's")
    place = tmp_path / "checkpoints"
    place.mkdir()
    for name in (".latest.4711", ".best.json.4711", ".latest.swp", ".best.old.4711"):
        (place / name).write_text("step-")
    with RunDirectory(tmp_path):
        left = [
            ".evener-owner",
            ".lock",
            ".settings.json.bak",
            ".summary.json.bak",
            "checkpoints",
            "evener.json",
        ]
        assert sorted(path.name for path in tmp_path.iterdir()) == left
        assert sorted(path.name for path in place.iterdir()) == [".best.old.4711", ".latest.swp"]


def test_a_run_that_could_not_begin_may_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(run_dir_module, "write_mark", full)
        with pytest.raises(StorageError, match="no run can begin"):
            fit(tasks.plain, run_dir=tmp_path, resume=Path("auto"), steps=2, **ONE)
    fit(tasks.plain, run_dir=tmp_path, resume=Path("auto"), steps=2, **ONE)


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Files cannot grow beyond this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lines(path: Path) -> list[str]:
    return [json.loads(line)["words"] for line in (path / "records.jsonl").read_text().splitlines()]


def test_a_full_disk_ends_the_run_in_words_and_leaves_whole_records(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.start(RunStart("task", {}, 1, 4, 9, steps_done=0))
    records.event(Note(0, "first"))
    with (
        room(60),
        pytest.raises(StorageError, match=r"records cannot be written to .*too large.*--on-full-disk go-on"),
    ):
        records.event(Note(1, "second"))
    records.end(None)
    assert lines(tmp_path) == ["first"]


def test_a_run_may_go_on_without_records_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    records = Records(tmp_path, stops=False, say=said.append)
    records.start(RunStart("task", {}, 1, 4, 9, steps_done=0))
    records.event(Note(0, "first"))
    with room(60):
        records.event(Note(1, "lost"))
        records.event(Note(2, "lost too"))
    records.event(Note(3, "there is room again"))
    records.end(None)
    assert lines(tmp_path) == ["first", "there is room again"]
    assert len(said) == 2
    assert "The run goes on without them" in said[0]
    assert "2 records of this run are not in" in said[1]


def test_a_run_does_not_go_on_in_the_directory_of_another(tmp_path: Path) -> None:
    place = tmp_path / "run"
    records = [Records(each, stops=False, say=list[str]().append) for each in (place, tmp_path / "other")]
    for name, each in zip(("run", "other"), records, strict=True):
        (tmp_path / name).mkdir()
        each.start(RunStart("task", {}, 1, 4, 9, steps_done=0))
    place.rename(tmp_path / "moved")
    records[0].event(Note(0, "nothing is there"))
    place.symlink_to(tmp_path / "other")
    with pytest.raises(
        StorageError, match=r"removed or moved while the run wrote it.*another run's directory"
    ):
        records[0].event(Note(1, "not mine"))
    for each in records:
        each.end(None)


def test_the_history_is_not_lost_on_a_full_disk(tmp_path: Path) -> None:
    """A run that goes on writes the records that it keeps anew."""
    kept = "".join(f'{{"kind": "step", "step": {n}}}\n' for n in range(9))
    (tmp_path / "records.jsonl").write_text(kept)
    with room(100), pytest.raises(StorageError, match="no run can begin in"):
        Records(tmp_path, goes_on=True).start(RunStart("task", {}, 1, 4, 9, steps_done=9))
    assert (tmp_path / "records.jsonl").read_text() == kept


LEFT = """
import os, signal
from evener.distributed.launch.scratch_dir import scratch
with scratch() as directory:
    print(directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_private_directory_of_a_launcher_that_was_killed_is_cleared_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = subprocess.run(
        [sys.executable, "-c", LEFT],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    unknown = Path(shutil.copytree(left, tmp_path / "evener-run-elsewhere"))
    (unknown / "owner").write_text(json.dumps(["elsewhere", "", 1, 2]))
    with scratch() as mine:
        assert not left.exists()
        clear(tmp_path)
        assert mine.is_dir()
    assert list(tmp_path.iterdir()) == [unknown]


def test_a_place_where_no_directory_can_be_made() -> None:
    with pytest.raises(ConfigurationError, match=r"/proc/runs cannot hold a run: .*"):
        new_run_dir("digits", 0.0, Path("/proc/runs"))
