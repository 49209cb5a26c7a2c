"""Whole runs whose directories lie elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import evener
from evener import checkpoint
from evener.checkpoint.remote.fetch import fetched
from evener.checkpoint.remote.lock import LOCK
from evener.checkpoint.weights_file import read_weights
from evener.cli.main import main
from evener.core.elsewhere import local_path
from evener.data.sharded import ShardedDataset
from evener.errors import ConfigurationError, DataError, DivergenceError, StorageError
from evener.training.fit import fit
from evener.training.reporting.task_file import Origin
from evener.training.run import Trained
from tests import elsewhere as places
from tests import tasks
from tests.elsewhere import memory
from tests.ranks import RankPool

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
