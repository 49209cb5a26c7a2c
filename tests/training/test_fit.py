from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import evener
from evener.checkpoint import weights_digest
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import StepRecord, as_json
from evener.errors import ConfigurationError, DivergenceError, RankError, ShareError, TaskError
from evener.files import dumps
from evener.training.engine import Engine
from evener.training.fit import FitJob, check_plan, fit
from evener.training.lifecycle.callback import Callback
from evener.training.run import Trained
from evener.training.step.step import Step
from tests import tasks


def alone(name: str = "plain", **settings: Any) -> Trained:
    usual = {"processes": 1, "device": "cpu", "dtype": "float64"}
    return fit(getattr(tasks, name), show=False, **(usual | settings))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "records.jsonl").read_text().splitlines()]


def records(run_dir: Path) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in lines(run_dir)]


def error_of(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((value - others[name]).abs().max().item() for name, value in weights.items())


def test_a_setting_that_there_is_not_is_told_before_a_task_that_is_missing() -> None:
    with pytest.raises(ConfigurationError, match="no setting is called epoch; did you mean epochs"):
        fit(epoch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'task'"):
        fit(epochs=3)  # type: ignore[call-arg]


@pytest.mark.usefixtures("warm")
def test_what_a_run_leaves(tmp_path: Path) -> None:
    """Two epochs of four batches on two ranks of unequal shares."""
    run_dir = tmp_path / "deep" / "run"
    trained = fit(
        tasks.plain, processes=2, device="cpu", run_dir=run_dir, dtype="float64", balance="3,1", show=False
    )
    summary = read(run_dir / "summary.json")
    assert summary == json.loads(dumps(as_json(trained.summary)))
    assert (summary["task"], summary["strategy"], summary["world_size"]) == ("plain", "ddp", 2)
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (8, 2, 94)
    assert summary["devices"] == ["cpu", "cpu"]
    assert summary["samples_per_second"] == pytest.approx(94 / summary["seconds"])
    assert summary["shares"] == pytest.approx([36 / 47, 11 / 47])  # 10 of 13, 6 of 8
    assert len(summary["sample_seconds"]) == 2
    assert summary["metrics"].keys() == {"loss", "accuracy"}
    assert {"evener", "python", "torch"} <= summary["versions"].keys()
    assert [set(rank) for rank in summary["ranks"]] == [
        {f"{name}_seconds" for name in ("compute", "wait", "input", "forward", "cpu", "queued")}
    ] * 2
    (summed,) = summary["collectives"]
    assert summed == {"name": "all_reduce", "algorithm": summary["allreduce"], "nbytes": 664, "calls": 8}
    assert summary["interrupted"] is False

    reference = alone()
    assert error_of(reference.weights, trained.weights) < 1e-13
    assert summary["final_loss"] == pytest.approx(reference.summary.final_loss, rel=1e-12)
    assert summary["metrics"] == pytest.approx(reference.summary.metrics, rel=1e-12)
    model = tasks.plain().model().double()
    model.load_state_dict(trained.weights)
    assert weights_digest(model) == summary["weights_digest"]

    config = read(run_dir / "config.json")
    assert (config["task"], config["batch_size"], config["world_size"]) == ("plain", 13, 2)
    kinds = [
        *(("step", n) for n in range(4)),
        ("evaluation", 4),
        *(("step", n) for n in range(4, 8)),
        ("evaluation", 8),
    ]
    assert records(run_dir) == kinds
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000004", "step-00000008"]
    assert summary["allreduce"].startswith("shared-memory")
    steps = [record for record in lines(run_dir) if record["kind"] == "step"]
    assert all(record["seconds"] > 0 and record["lr"] == 0.1 for record in steps)
    for step in steps:
        pairs = zip(step["forward_seconds"], step["compute_seconds"], strict=True)
        assert all(0 < forward < compute for forward, compute in pairs)
    start, *saves = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert (start["kind"], start["step"], start["run"]["world_size"], start["run"]["threads"]) == (
        "start",
        0,
        2,
        [1, 1],
    )
    assert 0 < start["startup_seconds"] < 200
    assert {save["kind"] for save in saves} <= {"save"}
    weights = sum(value.nbytes for value in trained.weights.values())
    peaks = [max(column) for column in zip(*(record["memory_peak"] for record in steps), strict=True)]
    assert min(peaks) > 2**20  # of two whole processes
    assert [of_rank.pop("peak") for of_rank in summary["memory"]] == peaks
    for of_rank, peak in zip(summary["memory"], peaks, strict=True):
        assert {of_rank[name] for name in ("parameters", "optimizer", "gradients")} <= {weights, 0}
        assert sum(of_rank.values()) == peak
    held = {name: steps[-1]["memory_parts"][name] for name in ("parameters", "gradients", "optimizer")}
    assert held == dict.fromkeys(held, [weights] * 2)


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({}, [4, 8]),
        ({"evaluate_every": 2, "epochs": 3}, [8, 12]),
        ({"evaluate_every": 0}, [8]),
        ({"steps": 6}, [4, 6]),
        ({"steps": 3}, [3]),
    ],
    ids=str,
)
def test_when_a_run_evaluates(tmp_path: Path, settings: dict[str, Any], at: list[int]) -> None:
    trained = alone(run_dir=tmp_path, **settings)
    assert [step for kind, step in records(tmp_path) if kind == "evaluation"] == at
    assert trained.summary.metrics["accuracy"] > 0


@pytest.mark.parametrize("first", [{"epochs": 1}, {"steps": 6}], ids=str)
def test_a_run_goes_on_in_its_directory(tmp_path: Path, first: dict[str, Any]) -> None:
    whole = alone("mixed", run_dir=tmp_path / "whole", epochs=3)
    alone("mixed", run_dir=tmp_path / "parts", **first)
    with (tmp_path / "parts" / "records.jsonl").open("a") as file:  # killed after a step more
        file.write('{"kind": "step", "step": 6}\n')
    rest = alone("mixed", run_dir=tmp_path / "parts", resume=tmp_path / "parts", epochs=3)
    steps = [step for kind, step in records(tmp_path / "parts") if kind == "step"]
    assert steps == list(range(12))
    for name in ("steps", "epochs", "samples"):
        assert getattr(rest.summary, name) == getattr(whole.summary, name)
    assert rest.weights.keys() == whole.weights.keys()


def test_a_run_that_goes_on_trains_the_same_weights(tmp_path: Path) -> None:
    whole = alone("penalty", epochs=3)
    alone("penalty", run_dir=tmp_path, steps=5)
    rest = alone("penalty", resume=tmp_path, epochs=3)
    assert rest.summary.weights_digest == whole.summary.weights_digest
    assert (rest.summary.steps, rest.summary.epochs, rest.summary.samples) == (12, 3, 141)


def test_a_run_that_was_complete_only_evaluates(tmp_path: Path) -> None:
    whole = alone(run_dir=tmp_path)
    again = alone(run_dir=tmp_path, resume=tmp_path)
    assert again.summary.weights_digest == whole.summary.weights_digest
    assert again.summary.metrics == whole.summary.metrics
    assert (again.summary.steps, again.summary.epochs) == (8, 2)
    assert math.isnan(again.summary.final_loss)
    assert read(tmp_path / "summary.json")["final_loss"] is None


def some_ignored(ignored: int) -> evener.Task:
    """Of 16 samples of a language model, the first have no target that counts."""
    targets = tasks.classes(16 * 7, 5).reshape(16, 7)
    targets[:ignored] = -100
    data = torch.utils.data.TensorDataset(torch.zeros(16, 7, dtype=torch.int64), targets)
    return tasks._task(model=tasks.Tokens, train=data, evaluate=None, metrics={}, batch_size=4)


def test_batches_without_a_term_are_noted_once_an_epoch(tmp_path: Path) -> None:
    settings: Any = {"processes": 1, "device": "cpu", "epochs": 2, "batch_size": 1, "run_dir": tmp_path}
    trained = fit(lambda: some_ignored(15), show=False, **settings)
    notes = [line for line in lines(tmp_path) if line["kind"] == "note" and "no target" in line["words"]]
    assert [note["step"] // 16 for note in notes] == [0, 1]
    assert trained.summary.steps == 32


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_run_in_which_no_target_counts_is_no_success(reduction: str) -> None:
    loss = torch.nn.CrossEntropyLoss(reduction=reduction)
    settings: Any = {"processes": 1, "device": "cpu", "epochs": 1}
    with pytest.raises(DivergenceError, match=r"no target of any batch counts, in all 4 steps"):
        fit(lambda: replace(some_ignored(16), loss=loss), show=False, **settings)


def test_nor_is_its_second_part_and_one_with_targets_before_is(tmp_path: Path) -> None:
    settings: Any = {"processes": 1, "device": "cpu", "show": False, "epochs": 1}
    with pytest.raises(DivergenceError, match="in all 4 steps"):
        fit(lambda: some_ignored(16), run_dir=tmp_path / "none", **settings)
    with pytest.raises(DivergenceError, match="in all 8 steps"):
        fit(lambda: some_ignored(16), resume=tmp_path / "none", **(settings | {"epochs": 2}))
    some = {"batch_size": 1, "seed": 3, **settings}
    assert fit(lambda: some_ignored(15), run_dir=tmp_path / "one", **some).summary.steps == 16
    again = fit(lambda: some_ignored(15), resume=tmp_path / "one", **(some | {"epochs": None, "steps": 17}))
    assert again.summary.steps == 17


def test_a_loop_and_an_evaluation_without_a_term_say_so(tmp_path: Path) -> None:
    with Engine(some_ignored(16), device="cpu", epochs=1) as engine:
        batches = engine.batches()
        first = next(batches)
        with pytest.warns(UserWarning, match="no target of the batch of step 0 counts"):
            engine.step(first)
    task = replace(some_ignored(0), evaluate=some_ignored(16).train)
    fit(lambda: task, show=False, processes=1, device="cpu", epochs=1, run_dir=tmp_path)
    words = [line["words"] for line in lines(tmp_path) if line["kind"] == "note"]
    assert any("the loss of the evaluation is not a number" in each for each in words)


class Interrupts(torch.nn.Linear):
    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 7:
            raise KeyboardInterrupt
        return super().forward(x)


def test_an_interrupted_run_leaves_its_summary(tmp_path: Path) -> None:
    task = lambda: tasks._task(model=lambda: Interrupts(6, 3), batch_size=4)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        fit(task, processes=1, device="cpu", run_dir=tmp_path, show=False)
    summary = read(tmp_path / "summary.json")
    assert summary["interrupted"] is True
    steps = [step for kind, step in records(tmp_path) if kind == "step"]
    assert summary["steps"] == 6
    assert steps == list(range(5))  # of the step before, the ranks had not told each other yet


class Unsteady(torch.nn.Linear):
    """Counts its passes, and draws a number in each, also in evaluation."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        return super().forward(x) + torch.rand(()) + len(self.seen) + self.calls


def wrong(outputs: torch.Tensor, targets: torch.Tensor) -> evener.Sum:
    return outputs.argmax(1) == targets  # type: ignore[return-value]


def test_the_evaluation_is_tried_before_the_first_step(tmp_path: Path) -> None:
    task = lambda: replace(tasks.plain(), metrics={"wrong": wrong})  # noqa: E731
    with pytest.raises(ConfigurationError, match="the metric 'wrong' returned Tensor"):
        fit(task, processes=1, device="cpu", run_dir=tmp_path, show=False)
    assert not [kind for kind, _ in records(tmp_path) if kind == "step"]


def test_the_trial_of_the_evaluation_leaves_no_trace() -> None:
    usual = {"model": Unsteady, "batch_size": 4}
    with_trial = lambda: replace(tasks.plain(), **usual)  # noqa: E731
    without = lambda: replace(tasks.plain(), evaluate=None, **usual)  # noqa: E731
    one, other = (fit(t, processes=1, device="cpu", show=False, steps=5) for t in (with_trial, without))
    one.weights.pop("calls"), other.weights.pop("calls")  # the evaluation at the end calls the model
    assert weights_digest(one.weights) == weights_digest(other.weights)


def test_what_cannot_work_is_found_before_ranks_are_started() -> None:
    """An error of a rank would be a `RankError` or name a rank."""
    for settings, error, words in (
        ({"processes": 2, "balance": "1,2,3"}, ShareError, "3"),
        ({"processes": 2, "balance": "uneven"}, ShareError, "uneven"),
        ({"processes": 999, "device": "cuda"}, ConfigurationError, "999"),
        ({"processes": 0}, ConfigurationError, "processes is 0"),
        (
            {"keep_best": "loss"},
            ConfigurationError,
            "keep_best='loss' keeps a checkpoint in the run directory",
        ),
        ({"rendezvous": "c10d"}, ConfigurationError, "rendezvous is 'c10d'; give an evener.Rendezvous"),
        ({"run_home": ""}, ConfigurationError, "run_home is empty"),
    ):
        with pytest.raises(error, match=words) as caught:
            fit("digits", **settings)  # type: ignore[arg-type]
        assert not isinstance(caught.value, RankError)
        assert "rank 0:" not in str(caught.value)
    with pytest.raises(TaskError, match="no task is called 'digit'"):
        fit("digit")


def test_the_plan_of_processes() -> None:
    assert check_plan(evener.RunConfig(processes=3, device="cpu", balance="1,2,3")) == 3
    assert 1 <= check_plan(evener.RunConfig(device="cpu")) <= 4


def last_step_spoils_a_gradient() -> tasks.Task:
    """The loss is finite and a gradient is not: the square root of zero, in the batch that ends the epoch."""

    class Spoiled(torch.nn.Linear):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            scores = super().forward(x)
            return scores + (scores * 0).sqrt() * 0 if self.passes == 4 else scores

    return tasks._task(model=lambda: Spoiled(6, 3), epochs=1)


def test_weights_of_a_gradient_that_is_not_finite_are_never_saved_or_reported(tmp_path: Path) -> None:
    """In the last step of all, where no later loss would tell."""
    with pytest.raises(DivergenceError, match="a gradient is not finite in step 3 on rank 0"):
        fit(last_step_spoils_a_gradient, processes=1, device="cpu", run_dir=tmp_path, show=False)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "summary.json").exists()


def test_an_update_that_goes_too_far_is_not_reported(tmp_path: Path) -> None:
    task = lambda: tasks._task(optimizer=lambda p: torch.optim.SGD(p, lr=3e38, weight_decay=9))  # noqa: E731
    with pytest.raises(DivergenceError, match=r"after step 0 the weight \S+ is not finite on rank 0"):
        fit(task, processes=1, device="cpu", run_dir=tmp_path, steps=1, show=False)
    assert not (tmp_path / "summary.json").exists()


class Twice(Observer):
    """Told twice of everything, and fails when it is told to."""

    def __init__(self, path: Path, fails: str = "") -> None:
        self.path, self.fails = path, fails

    def step(self, record: StepRecord) -> None:
        with self.path.open("a") as file:
            file.write(f"{record.step}\n")
        if self.fails == "step":
            raise RuntimeError("no room left")


@pytest.mark.usefixtures("warm")
def test_the_users_own_observers_are_told_on_rank_0_alone(tmp_path: Path) -> None:
    told = tmp_path / "told"
    fit(tasks.plain, processes=2, device="cpu", steps=3, observers=[Twice(told)], show=False)
    assert told.read_text().split() == ["0", "1", "2"]


def test_an_observer_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no room left"):
        fit(
            tasks.plain,
            processes=1,
            device="cpu",
            steps=3,
            observers=[Twice(tmp_path / "told", "step")],
            show=False,
        )


class Counting(Callback):
    """Counts what it is called for, and ends the run after three steps."""

    def begin(self, engine: evener.Engine) -> None:
        self.engine, self.known = engine, [engine.steps_done]

    def stepped(self, step: Step) -> None:
        assert step.number + 1 == self.engine.steps_done
        self.known.append(self.engine.steps_done)
        self.engine.observers.ended = self.engine.steps_done == 3

    def end(self) -> list[int]:
        return self.known


def attended() -> Trained:
    return fit(tasks.plain, device="cpu", steps=9, callback=Counting(), show=False)


def test_a_callback_acts_after_each_step_on_every_rank(ranks: Any) -> None:
    for trained in ranks(2).run(attended):
        assert trained.callback_result == [0, 1, 2, 3]
        assert trained.summary.steps == 3


def test_only_one_result_of_a_machine_travels_back(ranks: Any) -> None:
    job = FitJob(tasks.plain, {}, RunConfig(device="cpu", steps=1), False, [], None, None, True)
    first, second = ranks(2).run(job)
    assert first.weights
    assert second is None
