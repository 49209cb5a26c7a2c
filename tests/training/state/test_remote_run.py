"""Whole runs whose directories lie elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import evener
from evener import checkpoint
from evener.checkpoint import weights_digest
from evener.checkpoint.remote.fetch import fetched
from evener.checkpoint.remote.lock import LOCK
from evener.checkpoint.weights_file import read_weights
from evener.cli.main import main
from evener.core.elsewhere import host_name, local_path
from evener.data.sharded import ShardedDataset
from evener.errors import ConfigurationError, DataError, DivergenceError, StorageError
from evener.training.engine import Engine
from evener.training.fit import fit
from evener.training.reporting.task_file import Origin
from evener.training.run import Trained
from tests import elsewhere as places
from tests import tasks
from tests.elsewhere import memory
from tests.ranks import RankPool, fork_of_imports

__all__ = ["memory"]

URL = "memory://run"
LOCAL = "evener/elsewhere"


def trained(**settings: Any) -> Trained:
    usual = {
        "processes": 1,
        "device": "cpu",
        "dtype": "float64",
        "run_dir": URL,
        "save_every": 2,
        "epochs": 2,
    }
    return fit(tasks.plain, show=False, **(usual | settings))


def digest(**settings: Any) -> str:
    return trained(**settings).summary.weights_digest


def forget_here(tmp_path: Path) -> None:
    """As on another host."""
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def notes() -> list[str]:
    lines = [json.loads(line) for line in places.content()["run/records.jsonl"].splitlines()]
    return [line["words"] for line in lines if line["kind"] == "note"]


def failing(name: str, monkeypatch: pytest.MonkeyPatch, path: str = "", times: int = 10**6) -> list[str]:
    """An operation of memory:// that fails for paths with ``path`` in them; returns those that failed."""
    whole, failed = getattr(MemoryFileSystem, name), list[str]()

    def fails(self: Any, *args: Any, **known: Any) -> Any:
        if any(path in str(each) for each in args) and len(failed) < times:
            failed.append(str(args[-1]))
            raise OSError("the network is gone")
        return whole(self, *args, **known)

    monkeypatch.setattr(MemoryFileSystem, name, fails)
    return failed


def test_what_a_run_leaves_elsewhere(tmp_path: Path) -> None:
    """Eight steps, of which the checkpoints of the last two saves stay."""
    found = trained()
    assert found.summary.run_dir == URL
    assert places.steps() == [6, 8]
    here = local_path(URL)
    for path in here.rglob("*"):
        if path.is_file() and (path.name == ".metadata" or not path.name.startswith(".")):
            assert places.content()[f"run/{path.relative_to(here)}"] == path.read_bytes(), path
    assert {name.split("/")[1] for name in places.content()} == {
        *(
            "evener.json",
            "config.json",
            "task.json",
            "records.jsonl",
            "records.index",
            "attempts.jsonl",
            "summary.json",
            "checkpoints",
        )
    }
    assert json.loads(places.content()["run/config.json"])["run_dir"] == URL
    assert json.loads(places.content()["run/summary.json"])["run_dir"] == URL
    with pytest.raises(ConfigurationError, match="memory://run holds a finished run"):
        trained()
    forget_here(tmp_path)
    with pytest.raises(ConfigurationError, match="memory://run holds a finished run"):
        trained()
    assert trained(overwrite=True, steps=2).summary.steps == 2
    assert places.steps() == [2]


def test_a_run_goes_on_on_another_host(tmp_path: Path) -> None:
    whole = digest(run_dir=None)
    trained(steps=3, resume="auto")
    forget_here(tmp_path)
    assert digest(resume="auto") == whole
    lines = [json.loads(line) for line in places.content()["run/records.jsonl"].splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(8))
    assert any("goes on after step 3 of memory://run, on 1 rank" in text for text in notes())
    forget_here(tmp_path)
    assert digest(resume=f"{URL}/checkpoints/step-00000006", run_dir=tmp_path / "local") == whole
    assert digest(resume=URL, run_dir=tmp_path / "other", epochs=3) == digest(run_dir=None, epochs=3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The cache of a host that has never seen the run."""
    trained(keep_best="loss")
    forget_here(tmp_path)
    return tmp_path


@pytest.mark.parametrize("more", [(), ("--best",)])
def test_commands_that_read_a_run(
    run: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    task = ("--task", "tests.tasks:plain", "--processes", "1", "--device", "cpu")
    assert main(["evaluate", URL, *task, *more, "--json", "m.json"]) == 0
    found = json.loads((run / "m.json").read_text())
    assert found["checkpoint"].startswith("memory://run/checkpoints/step-")
    last = json.loads(places.content()["run/summary.json"])["metrics"]
    assert more or found["metrics"] == pytest.approx(last)
    assert main(["predict", URL, *task, *more, "--data", "evaluate", "--out", "p.npy"]) == 0
    which = f"{URL}/checkpoints/best" if more else URL
    assert main(["export", which]) == 0
    assert main(["plot", URL, "--out", "p.svg"]) == 0
    exported = capsys.readouterr().out.split("step-")[-1].split(".")[0]
    assert (run / f"step-{exported}.safetensors").is_file()


def test_a_task_that_is_not_trusted_is_named_with_the_url() -> None:
    path = local_path(URL)
    with pytest.raises(ConfigurationError, match=f"^{URL} says that its task is 'mine:task'"):
        Origin("mine:task", {}, {}).chosen(path, None, trust=False)
    with pytest.raises(ConfigurationError, match=f"^{URL} does not say which task"):
        Origin(None, {}, {}).chosen(path, None, trust=False)


def test_other_options_take_no_url(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["plot", URL, "--out", "s3://b/p.svg"], ["evaluate", URL, "--json", "s3://b/m.json"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "is a URL, and this must be a local file" in capsys.readouterr().err
    assert main(["evaluate", "memory://other", "--processes", "1"]) == 2
    assert "there is no run at memory://other" in capsys.readouterr().err


def test_weights_from_elsewhere(run: Path) -> None:
    weights = read_weights(local_path(URL))
    torch.save(dict(weights), run / "w.pt")
    expected = digest(weights=run / "w.pt", run_dir=None, steps=1)
    for url in (URL, f"{URL}/checkpoints/latest"):
        assert digest(weights=url, run_dir=None, steps=1) == expected
    with pytest.raises(ConfigurationError, match=r"there is no run at memory://w.pt"):
        trained(weights="memory://w.pt", run_dir=None, steps=1)


def test_the_command_names_the_url_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--processes", "1", "--device", "cpu", "--steps", "2", "--batch-size", "8"]
    assert main([*words, "--run-dir", URL]) == 0
    assert "in memory://run" in capsys.readouterr().out
    forget_here(tmp_path)
    words[words.index("--steps") + 1] = "3"
    assert main([*words, "--resume", URL]) == 0
    assert places.steps() == [2, 3]
    assert not (tmp_path / "runs").exists()


class Visitor(evener.Callback):
    """Reads the run's directory while the run writes there, and leaves logs in it."""

    steps: ClassVar[list[int]] = []

    def stepped(self, step: Any) -> None:
        here = local_path(URL)
        (here / "logs").mkdir(exist_ok=True)
        with (here / "logs/a.csv").open("a") as file:
            file.write("1\n")
        if step.number == 4:
            found = checkpoint.find(fetched(here, records=True))
            self.steps.append(found.rest["progress"]["steps"])


def test_who_reads_a_run_that_goes_on_does_not_disturb_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Visitor, "steps", [])
    settings: dict[str, Any] = {"save_every": 2, "save_mode": "blocking", "run_dir": URL, "show": False}
    fit(tasks.plain, processes=1, device="cpu", epochs=2, callback=Visitor(), **settings)
    assert Visitor.steps == [4]
    lines = [json.loads(line) for line in places.content()["run/records.jsonl"].splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(8))
    assert places.content()["run/logs/a.csv"] == b"1\n" * 8


def test_numbers_that_are_not_finite_are_left_by_a_checkpoint_from_here() -> None:
    settings: dict[str, Any] = {"non_finite": "restore", "save_every": 1, "run_dir": URL, "show": False}
    with pytest.raises(DivergenceError, match="the loss is inf"):
        fit(tasks.explodes, processes=1, device="cpu", **settings)
    assert [text.partition(": back")[2] for text in notes()] == [" to the checkpoint after 2 steps"] * 3
    assert LOCK not in "".join(places.content())


def test_a_url_that_was_emptied_takes_a_new_run_though_a_killed_save_left_remains_here() -> None:
    trained(steps=2)
    here = local_path(URL) / "checkpoints"
    (here / "step-00000002").rename(here / ".step-00000002")
    MemoryFileSystem.store.clear()
    assert trained(steps=2).summary.steps == 2
    assert places.steps() == [2]


def test_counts_of_shards_are_elsewhere_too(tmp_path: Path) -> None:
    opened: list[int] = []

    def opener(shard: int) -> Any:
        opened.append(shard)
        return tasks.rows_of(shard)

    own: dict[str, Any] = {"processes": 1, "device": "cpu", "show": False, "run_dir": URL}
    task = replace(tasks.sharded(), evaluate=None)
    for steps in (1, 2):
        opened.clear()
        data = ShardedDataset(range(6), opener, together=2)
        fit(replace(task, train=data), steps=steps, resume="auto" if steps > 1 else None, **own)
        assert (sorted(set(opened)) == [*range(6)]) == (steps == 1)
        forget_here(tmp_path)


def test_a_run_that_never_began_elsewhere_lost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def torn(shard: int) -> Any:
        yield from tasks.rows_of(shard)
        if shard == 5:
            raise OSError("a torn file")

    for _ in range(2):
        with pytest.raises(DataError, match="a torn file"):
            fit(
                replace(tasks.sharded(), train=ShardedDataset(range(6), torn)),
                processes=1,
                device="cpu",
                show=False,
                run_dir=URL,
            )
    assert "does not have all of the run" not in capsys.readouterr().err


# What is not Evener's


def test_nothing_that_evener_did_not_write_is_removed_or_replaced(tmp_path: Path) -> None:
    mine = {
        "run/notes.txt": b"1",
        "run/checkpoints/step-00000002/mine": b"2",
        "run/checkpoints/step-x/a": b"3",
    }
    places.put("run/notes.txt", b"1")
    places.put("run/checkpoints/step-x/a", b"3")
    trained(steps=2)
    places.put("run/checkpoints/step-00000002/mine", b"2")
    forget_here(tmp_path)
    trained(resume="auto")
    assert places.steps() == [6, 8]
    assert mine.items() <= places.content().items()
    left = [name for name in places.content() if "step-00000002" in name]
    assert left == ["run/checkpoints/step-00000002/mine"]


def test_a_directory_of_another_program_is_refused() -> None:
    places.put("run/config.json", b"{}")
    with pytest.raises(ConfigurationError, match=r"memory://run is not the directory of a run .*config.json"):
        trained()
    assert places.content() == {"run/config.json": b"{}"}
    places.put("other/checkpoints/step-00000002/rest.pt", b"theirs")
    with pytest.raises(StorageError, match="could not be uploaded"):
        trained(run_dir="memory://other", steps=2)
    assert places.content()["other/checkpoints/step-00000002/rest.pt"] == b"theirs"


# What is not trusted


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


# Several ranks


def _on_a_host_of_its_own(url: str, cache: str, **settings: Any) -> tuple[str, list[str]]:
    from evener.distributed.environment import detect

    rank = detect().rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evener.core.elsewhere.host_name", lambda: f"host{rank}")
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        found = trained(run_dir=url, processes=None, **settings)
        pieces = sorted(path.name for path in local_path(url).rglob("step-00000008/__*"))
        return found.summary.weights_digest, pieces


def test_ranks_on_two_hosts_upload_what_each_has(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Each host has a directory of its own, as without a shared disk, and the weights are divided."""
    url, cache = f"file://{tmp_path}/there/run", str(tmp_path / "hosts")
    divided = {"strategy": "sharded", "strategy_option": ("zero=3",), "resume": "auto"}
    pool = ranks(2)
    (first, of_first), (second, of_second) = pool.run(_on_a_host_of_its_own, url, cache, **divided)
    assert first == second
    assert (of_first, of_second) == (["__0_0.distcp"], ["__1_0.distcp"])
    there = tmp_path / "there/run/checkpoints"
    assert {"__0_0.distcp", "__1_0.distcp", "sums.json", "rest.pt"} <= {
        path.name for path in (there / "step-00000008").iterdir()
    }
    assert sorted(path.name for path in there.glob("step-*")) == ["step-00000006", "step-00000008"]
    whole = pool.run(_on_a_host_of_its_own, f"{url}2", cache, **divided, epochs=3)[0][0]
    shutil.rmtree(tmp_path / "hosts/evener/elsewhere/host1")
    shutil.copytree(tmp_path / "there", tmp_path / "copy")
    for change in ({}, divided):  # on one host alone, and on both
        if change:
            shutil.rmtree(tmp_path / "there")
            (tmp_path / "copy").rename(tmp_path / "there")
            assert pool.run(_on_a_host_of_its_own, url, cache, **divided, epochs=3)[0][0] == whole
        else:
            one = trained(run_dir=url, epochs=3, resume="auto").weights
            alone = trained(run_dir=None, epochs=3).weights
            assert max((one[name] - alone[name]).abs().max().item() for name in one) < 1e-12
