"""What is not Evener's is never removed or replaced, and no checkpoint is taken for one of another run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from evener import checkpoint
from evener.checkpoint import checksums
from evener.checkpoint import layout as folder
from evener.checkpoint import writer as saving
from evener.checkpoint.run_mark import Identity, identity_in, mark_in
from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.distributed.launch.rendezvous import Rendezvous
from evener.errors import CheckpointError, ConfigurationError, DataError, StorageError
from evener.training.engine import Engine
from evener.training.fit import fit
from evener.training.lifecycle.callback import Callback
from evener.training.run import Trained
from tests import tasks
from tests.distributed.processes import call
from tests.faults.tasks import digest
from tests.tiers import ALWAYS, NIGHTLY, crossed, spread


def alone(run_dir: Path, steps: int, **settings: Any) -> Trained:
    usual = {"processes": 1, "device": "cpu", "save_every": "2steps"}
    return fit(tasks.plain, show=False, run_dir=run_dir, steps=steps, **(usual | settings))


def kept(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def words_of(run_dir: Path) -> str:
    lines = map(json.loads, (run_dir / "records.jsonl").read_text().splitlines())
    return "\n".join(line["words"] for line in lines if line["kind"] == "note")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Interrupted(Observer):
    """Ends the run as a death does: nothing is saved, and no summary is written."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, record: StepRecord) -> None:
        if record.step + 1 == self.after:
            raise RuntimeError("dies")


def cut_short(run_dir: Path, after: int, **settings: Any) -> None:
    with pytest.raises(RuntimeError, match="dies"):
        alone(run_dir, 99, epochs=99, save_mode="blocking", observers=[Interrupted(after)], **settings)


# What is not Evener's


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "task.json",
        "records.jsonl",
        "summary.json",
        "evener.json",
        "checkpoints/step-00000004/x",
    ],
)
def test_a_directory_that_is_no_run_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('{"of": "another tool"}')
    before = contents(tmp_path)
    for resume in (None, "auto"):
        with pytest.raises(
            ConfigurationError, match=rf"has {name.partition('/')[0]}, which the run would replace"
        ):
            alone(tmp_path, 2, resume=resume)
        assert contents(tmp_path) == before


def test_other_files_are_no_hindrance_and_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".settings.json.bak").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    alone(tmp_path, 2)
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / ".settings.json.bak").read_text() == "mine"


def test_even_when_asked_to_replace_a_run_removes_only_checkpoints_of_evener(tmp_path: Path) -> None:
    alone(tmp_path, 2)
    foreign = tmp_path / "checkpoints" / "epoch-3"
    foreign.mkdir()
    (foreign / "rest.pt").write_text("mine")
    alone(tmp_path, 1, overwrite=True)
    assert kept(tmp_path) == [1]
    assert (foreign / "rest.pt").read_text() == "mine"
    for name, path in (("step-00000007", "step-00000007/model.bin"), ("latest", "latest")):
        other = tmp_path / f"with-{name}" / "checkpoints" / path
        other.parent.mkdir(parents=True)
        other.write_text("global_step100")
        with pytest.raises(ConfigurationError, match=f"has {name}, which is not of Evener"):
            alone(tmp_path / f"with-{name}", 2, overwrite=True)
        assert other.read_text() == "global_step100"


def test_copies_of_checkpoints_and_files_within_them_are_the_user_s(tmp_path: Path) -> None:
    alone(tmp_path, 4)
    place = tmp_path / "checkpoints"
    for copy in ("backup-step-4", "step-00000099", "step-4", "my-step-00000004"):
        shutil.copytree(place / "step-00000004", place / copy)
    (place / "step-00000002" / "notes.txt").write_text("mine")
    (place / "step-00000003").symlink_to(place / "step-00000004")
    alone(tmp_path, 8, resume=tmp_path)
    assert {path.name for path in place.iterdir() if path.name != "latest"} == {
        *("backup-step-4", "step-00000099", "step-4", "my-step-00000004"),
        *("step-00000002", "step-00000003", "step-00000006", "step-00000008"),
    }
    assert [path.name for path in (place / "step-00000002").iterdir()] == ["notes.txt"]
    assert checkpoint.find(place / "backup-step-4").rest["progress"]["steps"] == 4


def test_files_of_the_user_s_in_a_checkpoint_stay_though_they_are_named_much_like_evener_s(
    tmp_path: Path,
) -> None:
    alone(tmp_path, 4)
    mine = {".rest.pt.swp", ".sums.json.bak", "__mine.distcp", "rest.pt.orig"}
    for name in mine:
        (tmp_path / "checkpoints" / "step-00000002" / name).write_text("mine")
    (tmp_path / "checkpoints" / "step-00000002" / ".rest.pt.4711").write_text("of a writer that was killed")
    alone(tmp_path, 8, resume=tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints" / "step-00000002").iterdir()} == mine


@pytest.mark.parametrize("name", ["latest", "best", "best.json"])
def test_a_run_with_a_damaged_pointer_is_replaced_when_that_is_asked_for(tmp_path: Path, name: str) -> None:
    alone(tmp_path, 4, keep_best="accuracy")
    (tmp_path / "checkpoints" / name).write_text("{")
    alone(tmp_path, 2, overwrite=True, keep_best="accuracy")
    assert kept(tmp_path) == [2]
    assert checkpoint.find(tmp_path / "checkpoints" / "best").rest["progress"]["steps"] == 2


def test_a_save_does_not_replace_what_is_not_of_evener(tmp_path: Path) -> None:
    with Engine(tasks.plain(), device="cpu", steps=2) as engine:
        for name in ("step-00000000", ".step-00000000"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__0_0.distcp").write_text("mine")
            with pytest.raises(CheckpointError, match=f"{name} is there and is not of Evener: move it away"):
                engine.save(tmp_path)
            assert (tmp_path / name / "__0_0.distcp").read_text() == "mine"
            shutil.rmtree(tmp_path / name)
        (tmp_path / "latest").write_text("global_step100")
        with pytest.raises(CheckpointError, match="latest is there and is not of Evener"):
            engine.save(tmp_path)
        assert (tmp_path / "latest").read_text() == "global_step100"


# Which run a checkpoint is of


def test_a_latest_that_is_damaged_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    alone(tmp_path, 4)
    for number, damage in enumerate(("", "garbage", "step-00000077", "\0")):
        (tmp_path / "checkpoints" / "latest").write_text(damage)
        assert alone(tmp_path, 6 + 2 * number, resume="auto").summary.steps == 6 + 2 * number
        assert f"goes on after step {4 + 2 * number}" in words_of(tmp_path)
        assert "and no such checkpoint is there: going on from" in words_of(tmp_path)


def test_a_run_that_begins_anew_keeps_earlier_checkpoints_until_it_has_its_own(tmp_path: Path) -> None:
    cut_short(tmp_path, 6)
    assert kept(tmp_path) == [2, 4]
    cut_short(tmp_path, 1)
    assert kept(tmp_path) == [2, 4]
    assert "begins anew: step-00000004, step-00000002" in words_of(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"saved none yet.*earlier run: .*step-00000004, step-00000002"
    ):
        alone(tmp_path, 3, resume=tmp_path)
    assert alone(tmp_path, 3, resume="auto", save_every="3steps").summary.samples == 3 * 13
    assert kept(tmp_path) == [3, 4], "as many as --keep says, its own first"
    assert checkpoint.find(tmp_path).rest["progress"]["steps"] == 3
    alone(tmp_path, 5, resume=tmp_path)
    assert kept(tmp_path) == [4, 5], "of this run, in the place of the earlier one's"
    found = identity_in(tmp_path / "checkpoints" / "step-00000004", 4)
    assert found is not None
    assert found.run == (mark_in(tmp_path) or {})["run"]


def test_a_run_that_goes_on_from_an_earlier_checkpoint_leaves_the_later_ones_behind(tmp_path: Path) -> None:
    alone(tmp_path, 6)
    first = mark_in(tmp_path)
    cut_short(tmp_path, 5, resume=tmp_path / "checkpoints" / "step-00000004")
    assert first is not None
    assert (mark_in(tmp_path) or {})["history"] == [[first["run"], 4]]
    assert checkpoint.find(tmp_path).rest["progress"]["steps"] == 4, "where it begins"
    alone(tmp_path, 5, resume=tmp_path / "checkpoints" / "step-00000004")
    assert kept(tmp_path) == [4, 5]
    found = identity_in(tmp_path / "checkpoints" / "step-00000005", 5)
    assert found is not None
    assert found.history == ((first["run"], 4),)


def test_the_name_of_a_run_stays_when_it_goes_on_and_differs_elsewhere(tmp_path: Path) -> None:
    alone(tmp_path / "a", 2)
    name = (mark_in(tmp_path / "a") or {})["run"]
    alone(tmp_path / "a", 4, resume=tmp_path / "a")
    assert (mark_in(tmp_path / "a") or {})["run"] == name
    alone(tmp_path / "b", 6, resume=tmp_path / "a")
    found = identity_in(tmp_path / "b" / "checkpoints" / "step-00000006", 6)
    assert found is not None
    assert found.run != name
    assert found.history == ((name, 4),)


def dies_once(home: str) -> Any:
    """Another model's weights before the first save of the second run would be those of the first."""
    note = Path(home) / "died"
    if note.exists():
        return tasks.plain()

    def model() -> Any:
        note.write_text("")
        os._exit(9)

    return tasks._task(model=model)


@pytest.mark.slow
def test_after_a_death_before_the_first_save_no_earlier_run_is_gone_on_with(
    tmp_path: Path, ranks: Any
) -> None:
    run = tmp_path / "run"
    cut_short(run, 6)
    again = call(
        fit,
        dies_once,
        options={"home": str(tmp_path)},
        processes=2,
        device="cpu",
        steps=3,
        run_dir=run,
        show=False,
        recover="file",
        rendezvous=Rendezvous(max_restarts=1),
    )
    assert again.summary.samples == 3 * 13
    assert "goes on after step" not in words_of(run)
    assert again.summary.weights_digest == ranks(2).run(digest, tasks.plain, steps=3)[0]


def test_checkpoints_of_several_runs_without_a_latest_are_not_guessed_between(tmp_path: Path) -> None:
    for steps, place in ((2, "a"), (3, "b")):
        with Engine(tasks.plain(), device="cpu", steps=steps) as engine:
            for batch in engine.batches():
                engine.step(batch)
            engine.save(tmp_path / place)
    shutil.copytree(tmp_path / "a" / "step-00000002", tmp_path / "b" / "step-00000002")
    assert folder.complete(tmp_path / "b") == [tmp_path / "b" / "step-00000003"]
    (tmp_path / "b" / "latest").unlink()
    with pytest.raises(ConfigurationError, match="checkpoints of several runs"):
        checkpoint.find(tmp_path / "b")


def test_a_checkpoint_belongs_to_its_run_and_to_those_that_continue_it() -> None:
    first = Identity("a")
    second = first.branch(6)
    assert second.run not in ("", "a")
    assert second.includes("a", 6)
    assert not second.includes("a", 8)
    assert second.knows("a")
    assert not first.knows(second.run)
    assert Identity.from_plain(json.loads(json.dumps(second.as_plain()))) == second


def test_a_run_that_dies_before_its_first_save_is_gone_on_with_where_it_began(tmp_path: Path) -> None:
    cut_short(tmp_path, 9)
    assert kept(tmp_path) == [6, 8]
    cut_short(tmp_path, 9, resume=tmp_path / "checkpoints" / "step-00000006", save_every="99steps")
    runs = [(mark_in(tmp_path) or {})["run"]]
    for _ in range(2):  # dies again and again
        cut_short(tmp_path, 9, resume="auto", save_every="99steps")
        assert "goes on after step 6" in words_of(tmp_path)
        runs.append((mark_in(tmp_path) or {})["run"])
    assert len(set(runs)) == 1, "it is the same run"
    alone(tmp_path, 10, resume="auto", save_every="99steps")
    assert kept(tmp_path) == [6, 10]
    assert checkpoint.find(tmp_path).identity.run == runs[0]


@pytest.mark.parametrize(
    "tear", ["of another run", *spread(["{", "[]", None, "", "of step 7"], ALWAYS, NIGHTLY, NIGHTLY, NIGHTLY)]
)
def test_a_damaged_mark_is_said_and_the_one_before_is_gone_on_from(tmp_path: Path, tear: str | None) -> None:
    cut_short(tmp_path, 9)
    mark = tmp_path / "checkpoints" / "step-00000008" / "evener.json"
    before = mark.read_text()
    run = json.loads(before)["run"]
    others = {
        "of step 7": before.replace(": 8}", ": 7}"),
        "of another run": before.replace(run, f"&{run[1:]}"),
    }
    text = others.get(tear or "", tear)
    mark.unlink() if text is None else mark.write_text(text)
    torn = contents(mark.parent)
    for resume, steps in (("auto", 7), (tmp_path, 8)):
        mark.parent.with_name("latest").write_text("step-00000008")
        alone(tmp_path, steps, resume=resume, save_every="8steps")
        assert "step-00000008 cannot be read as a checkpoint: evener.json" in words_of(tmp_path)
        assert "begins anew" not in words_of(tmp_path)
    assert kept(tmp_path) == [7, 8]
    (aside,) = (tmp_path / "checkpoints").glob("damaged-step-00000008-*")
    assert sorted(contents(aside).values()) == sorted(torn.values()), "it is not removed"


def test_where_all_marks_are_damaged_nothing_is_begun_anew_or_removed(tmp_path: Path) -> None:
    cut_short(tmp_path, 5)
    for mark in (tmp_path / "checkpoints").rglob("evener.json"):
        mark.write_text("{")
    before = contents(tmp_path / "checkpoints")
    with pytest.raises(
        DataError, match=r"step-00000002 cannot be read.*begin a new run in another directory"
    ):
        alone(tmp_path, 4, resume="auto")
    assert contents(tmp_path / "checkpoints") == before


def test_a_copy_under_the_name_of_a_later_step_is_not_taken_for_it(tmp_path: Path) -> None:
    cut_short(tmp_path, 5)
    place = tmp_path / "checkpoints"
    shutil.copytree(place / "step-00000002", place / "step-00000099")
    (place / "latest").unlink()
    said: list[str] = []
    assert checkpoint.find(tmp_path, said.append).rest["progress"]["steps"] == 4
    assert "step-00000099 cannot be read as a checkpoint: evener.json is not that of step 99" in said[0]


@pytest.mark.slow
def test_all_ranks_know_the_run(tmp_path: Path) -> None:
    """Whoever takes the place of rank 0 goes on with its run."""
    attended = Runs()
    fit(tasks.plain, processes=2, device="cpu", steps=1, run_dir=tmp_path, show=False, callback=attended)
    names = {path.read_text() for path in tmp_path.glob("rank-*")}
    assert names == {(mark_in(tmp_path) or {})["run"]}
    assert len(list(tmp_path.glob("rank-*"))) == 2


class Runs(Callback):
    """Writes down which run each rank is of."""

    def begin(self, engine: Engine) -> None:
        (Path(str(engine.config.run_dir)) / f"rank-{engine.session.rank}").write_text(
            engine.state.identity.run
        )


# What saves leave that die


@pytest.mark.parametrize(
    ("name", "left"),
    crossed(
        [".step-00000004", f".step-00000003.{'0a' * 16}"],
        ["nothing", ".evener.json.4711"],
        lambda _: (ALWAYS, NIGHTLY),
    ),
)
def test_what_a_save_leaves_that_died_before_its_mark_is_no_hindrance(
    tmp_path: Path, name: str, left: str
) -> None:
    alone(tmp_path, 2)
    place = tmp_path / "checkpoints"
    (place / name).mkdir()
    if left != "nothing":
        (place / name / left).write_text("{")
    alone(tmp_path, 4, resume=tmp_path)
    assert {path.name for path in place.iterdir()} == {"latest", "step-00000002", "step-00000004"}


def test_a_save_has_its_mark_before_its_name_and_leaves_nothing_if_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = saving.write_mark, []

    def full(directory: Path, mark: Any) -> None:
        seen.append(directory.name)
        (directory / ".evener.json.1").write_text("{")
        if len(seen) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (directory / ".evener.json.1").unlink()
        real(directory, mark)

    monkeypatch.setattr(saving, "write_mark", full)
    with Engine(tasks.plain(), device="cpu", steps=2) as engine:
        with pytest.raises(CheckpointError, match="No space left"):
            engine.save(tmp_path)
        assert not list(tmp_path.iterdir())
        engine.save(tmp_path)
    assert all(re.fullmatch(r"\.step-00000000\.[0-9a-f]{32}", name) for name in seen)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000000"}


# Names that are not what they seem


def test_copies_with_names_like_those_of_saves_under_way_stay(tmp_path: Path) -> None:
    alone(tmp_path, 2)
    place = tmp_path / "checkpoints"
    names = (".step-00000002.backup", ".step-00000002.old_1", "step-0000000\u0662", ".step-0000000\u0662")
    for name in names:
        shutil.copytree(place / "step-00000002", place / name)
    alone(tmp_path, 6, resume=tmp_path)
    assert {path.name for path in place.iterdir()} == {*names, "latest", "step-00000004", "step-00000006"}


def test_a_latest_that_names_far_too_much_is_passed_over(tmp_path: Path) -> None:
    alone(tmp_path, 2)
    (tmp_path / "checkpoints" / "latest").write_text("step-" + "1" * 400)
    said: list[str] = []
    assert checkpoint.find(tmp_path, said.append).rest["progress"]["steps"] == 2
    assert "no such checkpoint is there" in said[0]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_makes_saving_impossible_is_said_before_training(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"checkpoints is no directory.*move it away"):
        alone(tmp_path, 2, overwrite=overwrite)
    (tmp_path / "checkpoints").unlink()
    alone(tmp_path, 2)
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink()
    latest.mkdir()
    with pytest.raises(ConfigurationError, match=r"latest is a directory.*move it away"):
        alone(tmp_path, 4, overwrite=overwrite, resume=None if overwrite else tmp_path)
    assert kept(tmp_path) == [2]


def test_a_best_value_of_another_tool_stays(tmp_path: Path) -> None:
    best = tmp_path / "checkpoints" / "best.json"
    best.parent.mkdir()
    best.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"has best\.json, which is not of Evener"):
        alone(tmp_path, 2, overwrite=True, keep_best="accuracy")
    best.unlink()
    alone(tmp_path, 2)
    best.write_text("mine")
    with pytest.raises(CheckpointError, match=r"best\.json is there and is not of Evener"):
        alone(tmp_path, 4, resume=tmp_path, keep_best="accuracy")
    assert best.read_text() == "mine"
    best.unlink()
    for steps in (6, 8):
        alone(tmp_path, steps, resume=tmp_path, keep_best="accuracy")
    assert json.loads(best.read_text())["metric"] == "accuracy"
    alone(tmp_path, 2, overwrite=True, keep_best="loss")
    assert json.loads(best.read_text())["metric"] == "loss"


# Places


def test_checkpoints_may_lie_behind_a_symbolic_link(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(
        ConfigurationError, match=r"symbolic link to .*elsewhere, which is not there: make that directory"
    ):
        alone(run, 2)
    elsewhere.mkdir()
    alone(run, 2)
    alone(run, 4, resume=run)
    alone(run, 2, overwrite=True)
    assert (run / "checkpoints").is_symlink()
    assert [path.name for path in elsewhere.glob("step-*")] == ["step-00000002"]


class Moves(Observer):
    """Acts on the run directory after a step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def step(self, record: StepRecord) -> None:
        if record.step == 2:
            self.act()


def test_a_relative_run_directory_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    trained = alone(Path("run"), 4, observers=[Moves(lambda: os.chdir(tmp_path / "elsewhere"))])
    assert kept(tmp_path / "run") == [2, 4]
    assert (tmp_path / "run" / "summary.json").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert trained.summary.run_dir == str(tmp_path / "run")


def remove(run: Path) -> None:
    """At once: ``rmtree`` alone fails where a checkpoint is written meanwhile."""
    run.rename(run.with_name("removed"))
    shutil.rmtree(run.with_name("removed"), ignore_errors=True)


@pytest.mark.parametrize("how", [remove, lambda run: run.rename(run.with_name("moved"))], ids=["rm", "mv"])
def test_a_run_directory_that_is_removed_is_noticed(tmp_path: Path, how: Any) -> None:
    run = tmp_path / "run"
    with pytest.raises(StorageError, match="removed or moved while the run wrote it"):
        alone(run, 6, observers=[Moves(lambda: how(run))], save_every="9steps")
    assert not (run / "checkpoints").exists()


def test_a_run_may_go_on_without_its_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trained = alone(run, 6, observers=[Moves(lambda: remove(run))], on_full_disk="go-on")
    assert trained.summary.steps == 6
    assert "removed or moved while the run wrote it" in capfd.readouterr().err
    assert checkpoint.find(run).rest["progress"]["steps"] == 6, "the last one is written in any case"


def test_a_checkpoint_may_be_moved_away_after_each_save(tmp_path: Path) -> None:
    """As by a loop that writes to one name and then gives it another."""
    with Engine(tasks.plain(), device="cpu", steps=2) as engine:
        for batch in engine.batches():
            engine.step(batch)
            engine.save(tmp_path / "partial")
            (tmp_path / "partial").rename(tmp_path / f"after-{engine.steps_done}")
    for steps in (1, 2):
        assert checkpoint.find(tmp_path / f"after-{steps}").rest["progress"]["steps"] == steps


def test_tensors_that_are_torn_under_right_checksums_are_an_error_in_words(tmp_path: Path) -> None:
    alone(tmp_path, 2)
    place = tmp_path / "checkpoints" / "step-00000002"
    (data,) = place.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-200])
    sums = json.loads((place / "sums.json").read_text())
    sums[data.name] = checksums.sum_of(data)
    (place / "sums.json").write_text(json.dumps(sums))
    with (
        Engine(tasks.plain(), device="cpu", steps=3) as engine,
        pytest.raises(DataError, match="cannot be read as a"),
    ):
        engine.load(place)
