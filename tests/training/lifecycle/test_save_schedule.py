"""When a run saves, what stays, and what becomes of a save that fails."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evener
from evener import checkpoint
from evener.checkpoint import writer as saving
from evener.core.config.intervals import Interval
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.errors import CheckpointError, ConfigurationError, DataError, InterruptedRunError
from evener.training.engine import Engine
from evener.training.fit import fit
from evener.training.run import Trained
from tests import tasks
from tests.tiers import ALWAYS, NIGHTLY, crossed
from tests.training.reporting.test_run_dir import room


def alone(task: Any = tasks.plain, **settings: Any) -> Trained:
    usual = {"processes": 1, "device": "cpu", "dtype": "float64"}
    return fit(task, show=False, **(usual | settings))


def kept(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def words_of(run_dir: Path) -> str:
    lines = map(json.loads, (run_dir / "records.jsonl").read_text().splitlines())
    return "\n".join(line["words"] for line in lines if line["kind"] == "note")


# When


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500steps", Interval(steps=500)),
        ("1 step", Interval(steps=1)),
        ("10min", Interval(seconds=600)),
        ("1.5h", Interval(seconds=5400)),
        ("10", Interval(steps=10)),
        (10, Interval(steps=10)),
        ("30s", Interval(seconds=30)),
        ("2epochs", Interval(epochs=2)),
    ],
)
def test_an_interval(text: str | int, interval: Interval) -> None:
    assert Interval.parse(text) == interval


@pytest.mark.parametrize("text", ["", "0", "steps", "0steps", "1.5steps", "0min", "-1h", "1 week", "1e"])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no interval"):
        RunConfig(save_every=text)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [4, 8]),
        ({"epochs": 3}, [8, 12]),
        ({"keep": 5, "save_every": "3steps"}, [3, 6, 8]),
        ({"keep": 1, "save_every": "3steps"}, [8]),
        ({"save_every": "2epochs", "epochs": 5, "keep": 9}, [8, 16, 20]),
        ({"save_every": "5steps", "steps": 7, "keep": 9}, [5, 7]),
        ({"save_every": "1h", "keep": 9}, [8]),
        ({"save_mode": "blocking", "save_every": "3steps", "keep": 9}, [3, 6, 8]),
    ],
    ids=str,
)
def test_when_a_run_saves_and_what_stays(tmp_path: Path, settings: dict[str, Any], steps: list[int]) -> None:
    alone(run_dir=tmp_path, **settings)
    assert kept(tmp_path) == steps
    assert checkpoint.find(tmp_path).rest["progress"]["steps"] == steps[-1]


def test_saves_by_the_clock(tmp_path: Path) -> None:
    class Slow(Observer):
        def step(self, record: StepRecord) -> None:
            time.sleep(0.1)

    alone(run_dir=tmp_path, save_every="0.25s", keep=99, epochs=5, observers=[Slow()])
    assert 3 <= len(kept(tmp_path)) <= 9  # in 2 s, and one step or two after the time is over


@pytest.mark.usefixtures("warm")
def test_all_ranks_save_after_the_same_step_whoever_s_clock_it_is(tmp_path: Path) -> None:
    fit(
        tasks.slow,
        processes=2,
        device="cpu",
        run_dir=tmp_path,
        save_every="0.2s",
        steps=12,
        keep=99,
        show=False,
    )
    assert len(kept(tmp_path)) >= 3


def test_the_best_stays(tmp_path: Path) -> None:
    """The accuracy is highest after the second epoch, by a learning rate that then spoils everything."""

    def task() -> evener.Task:
        return tasks._task(
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda epoch: 1.0 if epoch < 2 else -3.0
            ),
            epochs=6,
        )

    alone(task, run_dir=tmp_path, keep_best="loss")
    place = tmp_path / "checkpoints"
    evaluations = [
        json.loads(line)
        for line in (tmp_path / "records.jsonl").read_text().splitlines()
        if "metrics" in line
    ]
    best = min(evaluations, key=lambda line: line["metrics"]["loss"])
    assert 0 < best["step"] < 20, "neither one that is kept anyhow"
    assert kept(tmp_path) == [best["step"], 20, 24]
    assert checkpoint.find(place / "best").rest["progress"]["steps"] == best["step"]
    assert json.loads((place / "best.json").read_text())["value"] == best["metrics"]["loss"]
    alone(task, run_dir=tmp_path, keep_best="loss", resume=tmp_path, epochs=7)
    assert kept(tmp_path) == [best["step"], 24, 28], "also by a run that goes on"


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("f1", "the metrics are loss, accuracy"),
        ("loss:up", "METRIC:min or METRIC:max"),
        (":min", "keep_best is"),
    ],
)
def test_a_best_that_cannot_be(tmp_path: Path, metric: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        alone(run_dir=tmp_path, keep_best=metric)


def test_a_best_that_is_misspelt_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keep_best is 'los'; the metrics are loss"):
        alone(run_dir=tmp_path, keep_best="los")
    assert '"kind": "step"' not in (tmp_path / "records.jsonl").read_text()


def test_a_best_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing to evaluate on"):
        alone(lambda: tasks._task(evaluate=None), run_dir=tmp_path, keep_best="loss")


# While training goes on


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written is the state at the save, not at the end."""
    gate, write = threading.Event(), saving.state_dict_saver.save

    def late(*arguments: Any, **settings: Any) -> Any:
        assert gate.wait(30)
        return write(*arguments, **settings)

    monkeypatch.setattr(saving.state_dict_saver, "save", late)
    with Engine(tasks.plain(), device="cpu", epochs=2) as engine:
        for batch in engine.batches():
            engine.step(batch)
            if engine.steps_done == 3:
                wanted = engine.state_dict()
                engine.save(tmp_path, wait=False)
                assert not (tmp_path / "latest").exists()
            if engine.steps_done == 6:
                gate.set()
                engine.finish_saving()
                assert (tmp_path / "latest").exists()
    with Engine(tasks.plain(), device="cpu", epochs=2) as engine:
        engine.load(tmp_path)
        assert engine.steps_done == 3
        for name, value in engine.state_dict()["model"].items():
            assert torch.equal(value, wanted["model"][name])


def test_a_save_that_fails_is_told_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "weights")

    with Engine(tasks.plain(), device="cpu", epochs=2) as engine:
        for batch in engine.batches():
            engine.step(batch)
        first = engine.save(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(saving.state_dict_saver, "save", full)
            engine.save(tmp_path, wait=False)
            with pytest.raises(
                CheckpointError,
                match="rank 0 could not write it: No space left on device: weights; make room",
            ):
                engine.finish_saving()
            with pytest.raises(CheckpointError, match="No space left"):
                engine.save(tmp_path)
        assert checkpoint.find(tmp_path).path == first
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        engine.save(tmp_path)


class FullFor(Observer):
    """Has the disk full up to a step."""

    def __init__(self, directory: Path, until: int) -> None:
        self.directory, self.until = directory, until

    def start(self, run: Any) -> None:
        self.directory.mkdir(exist_ok=True)
        self.directory.rmdir()
        self.directory.write_text("in the way")

    def step(self, record: StepRecord) -> None:
        if record.step == self.until:
            self.directory.unlink()


def test_a_full_disk_stops_the_run_or_not_as_asked(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="rank 0 could not write it"):
        alone(run_dir=tmp_path, observers=[FullFor(place, 99)])
    place.unlink()
    settings: dict[str, Any] = {"on_full_disk": "go-on", "save_every": "2steps", "keep_best": "loss"}
    alone(run_dir=tmp_path, observers=[FullFor(place, 7)], **settings)
    assert kept(tmp_path) == [8], "the best one, too, could not be saved after the first epoch"
    assert (place / "best").read_text().strip() == "step-00000008"
    assert "was not saved: rank 0 could not write it" in words_of(tmp_path)
    for mode in ("async", "blocking"):  # a run that cannot write its last checkpoint has not ended well
        full = FullFor(tmp_path / mode / "checkpoints", 99)
        with pytest.raises(CheckpointError, match="rank 0 could not write it"):
            alone(run_dir=tmp_path / mode, observers=[full], on_full_disk="go-on", save_mode=mode)


class NanOnce(nn.Linear):
    """A layer whose output is not finite in one call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        found = super().forward(x)
        return found * float("nan") if self.calls == 5 and self.training else found


def test_a_run_that_goes_on_without_a_save_also_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save after step 4 fails, and the next step is not finite: the checkpoint before is taken."""
    save, tries = saving.state_dict_saver.save, [0]

    def full_once(*args: Any, **known: Any) -> Any:
        tries[0] += 1
        if tries[0] == 2:
            raise OSError(28, "No space left on device", "weights")
        return save(*args, **known)

    monkeypatch.setattr(saving.state_dict_saver, "save", full_once)
    task = dataclasses.replace(tasks.plain(), model=lambda: NanOnce(6, 3))
    settings: Any = {"non_finite": "restore", "save_every": "2steps", "steps": 8, "run_dir": tmp_path}
    with pytest.raises(CheckpointError, match="No space left"):
        alone(task, **settings)
    tries[0] = 0
    trained = alone(task, on_full_disk="go-on", **settings)
    assert trained.summary.steps == 8
    assert "No space left on device: weights; make room" in words_of(tmp_path)
    assert "back to the checkpoint after 2 steps" in words_of(tmp_path)


class Remembers(torch.optim.lr_scheduler.ExponentialLR):
    """A scheduler whose state has a part that it is given."""

    def __init__(self, optimizer: torch.optim.Optimizer, part: Any) -> None:
        self.part = part
        super().__init__(optimizer, 0.9)


def test_a_run_whose_checkpoints_could_not_be_read_is_refused_before_it_trains(tmp_path: Path) -> None:
    def task(part: Any) -> Any:
        scheduler = lambda optimizer: Remembers(optimizer, part)  # noqa: E731
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=np.float64(0.1))  # noqa: E731
        return lambda: tasks._task(scheduler=scheduler, optimizer=optimizer)

    with pytest.raises(ConfigurationError, match=r"the state\.scheduler\.part is of type deque"):
        alone(task(deque()), steps=1, run_dir=tmp_path)
    alone(task(np.float64(2.0)), steps=1, run_dir=tmp_path)
    assert alone(task(np.float64(2.0)), steps=2, run_dir=tmp_path, resume=tmp_path).summary.steps == 2


def fails_on_rank_one(path: Path) -> str:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch, Engine(tasks.plain(), device="cpu", steps=2) as engine:
        for batch in engine.batches():
            engine.step(batch)
        if engine.session.rank == 1:
            patch.setattr(saving.sums, "sum_of", fail)
            patch.setattr(saving, "_sums", fail)
        engine.save(path, wait=False)
        with pytest.raises(CheckpointError) as caught:
            engine.finish_saving()
        return str(caught.value)


def test_all_ranks_learn_of_a_failure_of_one(ranks: Any, tmp_path: Path) -> None:
    for words in ranks(2).run(fails_on_rank_one, tmp_path):
        assert "rank 1 could not write it: Input/output error" in words
    assert not list(tmp_path.iterdir())


def fills_the_disk(path: Path) -> str:
    """PyTorch's writer raises a RuntimeError, whose cause does not travel from rank to rank."""
    wide = lambda: nn.Sequential(nn.Linear(6, 9000), nn.Linear(9000, 3))  # noqa: E731
    with Engine(tasks._task(model=wide), device="cpu", steps=2) as engine:
        # The ranks' group for saving meets by a file, which may be longer.
        engine.save(path.with_name("before"))
        with room(100_000), pytest.raises(CheckpointError) as caught:
            engine.save(path)
        return str(caught.value)


def test_a_disk_that_is_full_is_said_to_be_full(ranks: Any, tmp_path: Path) -> None:
    for words in ranks(2).run(fills_the_disk, tmp_path):
        assert "could not write it: File too large: " in words
        assert "raise the limit on the size of files (ulimit -f), or write elsewhere" in words
    assert not list(tmp_path.iterdir())


# Damage


def damaged(tmp_path: Path) -> Path:
    alone(run_dir=tmp_path, save_every="3steps")
    assert kept(tmp_path) == [6, 8]
    return tmp_path / "checkpoints" / "step-00000008"


def test_a_flipped_bit_is_found_and_the_one_before_is_used(tmp_path: Path) -> None:
    whole = alone(run_dir=tmp_path / "whole", epochs=3)
    latest = damaged(tmp_path / "run")
    (data,) = latest.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(DataError, match="its checksum differs"):
        checkpoint.find(latest)
    rest = alone(run_dir=tmp_path / "run", resume=tmp_path / "run", epochs=3)
    assert rest.summary.weights_digest == whole.summary.weights_digest
    words = words_of(tmp_path / "run")
    assert "step-00000008 cannot be read as a checkpoint: __0_0.distcp is not what was written" in words
    assert "step-00000006 instead" in words


FILES = ("rest.pt", "tensors.json", ".metadata", "__0_0.distcp", "sums.json", "evener.json")


@pytest.mark.parametrize(("name", "how"), crossed(FILES, ["truncated", "gone"], lambda _: (ALWAYS, NIGHTLY)))
def test_a_file_that_is_torn_or_gone(tmp_path: Path, name: str, how: str) -> None:
    path = damaged(tmp_path) / name
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])
    said: list[str] = []
    found = checkpoint.find(tmp_path, said.append)
    assert found.rest["progress"]["steps"] == 6
    assert len(said) == 1
    assert f"step-00000008 cannot be read as a checkpoint: {name}" in said[0]


def test_what_was_saved_in_a_history_that_was_left_is_never_gone_on_from(tmp_path: Path) -> None:
    """The run goes on from an earlier checkpoint; what lies after that one is not before anything."""
    damaged(tmp_path)
    place = tmp_path / "checkpoints"
    alone(run_dir=tmp_path, resume=place / "step-00000006", steps=7)
    assert kept(tmp_path) == [6, 7]
    (place / "step-00000007" / "sums.json").unlink()
    said: list[str] = []
    assert checkpoint.find(tmp_path, said.append).rest["progress"]["steps"] == 6
    assert said


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_is_not_run(tmp_path: Path) -> None:
    """Its checksum may be right: who can write the one can write the other."""
    place, ran = damaged(tmp_path), tmp_path / "ran"
    torch.save(Malicious(ran), place / "rest.pt")
    found = json.loads((place / "sums.json").read_text())
    found = {path.name: saving.sums.sum_of(path) for path in place.iterdir() if path.name in found}
    (place / "sums.json").write_text(json.dumps(found))
    refused = pytest.raises(DataError, match="cannot be read as a checkpoint")
    with Engine(tasks.plain(), device="cpu", steps=1) as engine, refused:
        engine.load(place)
    assert not ran.exists()


@pytest.mark.usefixtures("warm")
def test_two_ranks_agree_on_what_is_whole(tmp_path: Path) -> None:
    latest = damaged(tmp_path)
    (latest / "sums.json").unlink()
    trained = fit(
        tasks.plain, processes=2, device="cpu", dtype="float64", run_dir=tmp_path, resume=tmp_path, show=False
    )
    assert trained.summary.steps == 8
    assert "step-00000006 instead" in words_of(tmp_path)


# Going on


def drawn_dropout() -> evener.Task:
    """Of PyTorch's own kind, which draws from a generator; data that draw from Python's and NumPy's."""
    model = lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Tanh(), nn.Linear(16, 3))  # noqa: E731
    return tasks._task(model=model)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_bits_on_the_same_ranks(tmp_path: Path, processes: int) -> None:
    """In mid-epoch, with random numbers that go on where they were."""
    how: dict[str, Any] = {"processes": processes, "device": "cpu", "show": False}
    whole = fit(drawn_dropout, **how)
    fit(drawn_dropout, run_dir=tmp_path, steps=6, **how)
    rest = fit(drawn_dropout, resume=tmp_path, **how)
    assert rest.summary.weights_digest == whole.summary.weights_digest


def test_other_data_of_the_same_length_are_refused(tmp_path: Path) -> None:
    alone(run_dir=tmp_path, steps=3)
    data = tasks.plain().train
    shifted = torch.utils.data.TensorDataset(data.tensors[0] + 1e-3, data.tensors[1])  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="was made with other data: sample 0 is not the same"):
        alone(lambda: tasks._task(train=shifted), resume=tmp_path)


class Augmented(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), float(index)) + torch.rand(6), index % 3


def test_data_that_are_augmented_at_random_are_taken_as_they_are(tmp_path: Path) -> None:
    alone(lambda: tasks._task(train=Augmented()), run_dir=tmp_path, steps=3)
    assert alone(lambda: tasks._task(train=Augmented()), resume=tmp_path).summary.steps == 8


def test_other_settings_are_said(tmp_path: Path) -> None:
    alone(run_dir=tmp_path, steps=3)
    alone(run_dir=tmp_path, resume=tmp_path, clip_norm=1.0)
    assert "the run goes on with clip_norm 1.0, and was begun with None" in words_of(tmp_path)


def test_auto_goes_on_if_there_is_something_to_go_on_from(tmp_path: Path) -> None:
    assert alone(run_dir=tmp_path, resume="auto", steps=3).summary.steps == 3
    assert alone(run_dir=tmp_path, resume="auto").summary.steps == 8
    steps = [json.loads(line)["step"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert steps.count(0) == 1
    with pytest.raises(ConfigurationError, match="name the directory of the run"):
        RunConfig(resume="auto")  # type: ignore[arg-type]


# Stopping


class Signals(Observer):
    """A person who presses Ctrl-C after a step."""

    def __init__(self, at: int, *numbers: signal.Signals, gap_seconds: float = 0.0) -> None:
        self.at, self.numbers, self.gap_seconds = at, numbers, gap_seconds

    def step(self, record: StepRecord) -> None:
        if record.step == self.at:
            for number in self.numbers:
                os.kill(os.getpid(), number)
                time.sleep(self.gap_seconds)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT]
)
def test_a_run_that_is_asked_to_stop_saves_where_it_stands(tmp_path: Path, number: signal.Signals) -> None:
    whole = alone(tasks.penalty)
    with pytest.raises(
        InterruptedRunError, match=rf"interrupted by {number.name} at step \d, saved. Continue with --resume "
    ) as caught:
        alone(tasks.penalty, run_dir=tmp_path, observers=[Signals(2, number)])
    assert caught.value.exit_status == 128 + number
    stood = checkpoint.find(tmp_path).rest["progress"]["steps"]
    assert 3 <= stood <= 6, "within three steps of the signal, which is told a step late"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["interrupted"], summary["steps"]) == (True, stood)
    rest = alone(tasks.penalty, run_dir=tmp_path, resume=tmp_path)
    assert rest.summary.weights_digest == whole.summary.weights_digest
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_workers_of_an_interrupted_run_end_with_it(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(InterruptedRunError) as held:
        alone(run_dir=tmp_path, observers=[Signals(0, signal.SIGTERM)], workers=1, epochs=50)
    assert held.value.__traceback__ is not None, "which keeps what the run had"
    assert set(multiprocessing.active_children()) <= before


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError) as caught:
        alone(run_dir=tmp_path, observers=[Signals(2, signal.SIGINT, signal.SIGINT, gap_seconds=0.6)])
    assert "saved" not in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


def test_the_same_signal_on_two_ways_is_one(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError, match=r"saved\. Continue with"):
        alone(run_dir=tmp_path, observers=[Signals(2, signal.SIGTERM, signal.SIGTERM)])


def test_a_run_that_leaves_nothing_ends_at_once() -> None:
    with pytest.raises(InterruptedRunError, match="interrupted by SIGINT"):
        alone(observers=[Signals(2, signal.SIGINT)])
