from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import evener
from evener.checkpoint.layout import named
from evener.checkpoint.weights_file import export
from evener.cli.main import main
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import ConfigurationError, TaskError
from evener.strategies.sharded.sharded import Sharded
from evener.testing import check_strategy
from evener.tools.conformance.trials import NAMES
from evener.training.engine import Engine
from evener.training.fit import fit
from evener.training.inference import InferenceSetup, evaluate_run
from tests import tasks
from tests.ranks import RankPool
from tests.tiers import ALWAYS, SLOW, spread

ONE: dict[str, Any] = {"processes": 1, "device": "cpu", "show": False}
ROWS: dict[str, Any] = {
    "zero 3": Sharded(zero=3),
    "zero 1": Sharded(zero=1, shard_sizes="2,1"),
    "pipeline": "pipeline",
}


def engine_of(name: str, average: Any, **settings: Any) -> Engine:
    task = replace(getattr(tasks, name)(), average=average)
    return Engine(task, RunConfig(**({"device": "cpu", "dtype": "float64"} | settings)))


def averages(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.learner.average.tensors().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


# One device: what torch computes


@pytest.mark.parametrize(
    ("task", "buffer", "average", "multi_avg_fn"),
    [  # torch's SWA cannot average the integer that BatchNorm counts in
        ("batch_norm", "1.running_mean", evener.ema(0.8), get_ema_multi_avg_fn(0.8)),  # type: ignore[no-untyped-call]
        ("buffers", "average", evener.swa(), get_swa_multi_avg_fn()),  # type: ignore[no-untyped-call]
        ("plain", "", *[get_ema_multi_avg_fn(0.5)] * 2),  # type: ignore[no-untyped-call]
    ],
)
def test_it_is_the_average_that_torch_computes(
    task: str, buffer: str, average: Any, multi_avg_fn: Any
) -> None:
    with engine_of(task, average) as engine:
        twin = AveragedModel(engine.model, multi_avg_fn=multi_avg_fn, use_buffers=True)
        for batch in engine.batches():
            engine.step(batch)
            twin.update_parameters(engine.model)
            expected = {n: t for n, t in twin.module.state_dict().items() if t.is_floating_point()}
            assert_close(averages(engine), expected, 1e-6)  # torch divides in float32
        assert not buffer or buffer in averages(engine)


def test_it_begins_late_and_takes_some_of_the_updates() -> None:
    with engine_of("plain", evener.swa(start=2, every=3)) as engine:
        kept = []
        for batch in engine.batches():
            engine.step(batch)
            if engine.steps_done in (5, 8):
                kept.append({name: p.detach().clone() for name, p in engine.model.named_parameters()})
        assert (engine.learner.average.updates, engine.learner.average.number) == (8, 2)
        assert_close(averages(engine), {name: (kept[0][name] + kept[1][name]) / 2 for name in kept[0]})


def test_the_training_is_the_same_to_the_bit_and_its_evaluation_too() -> None:
    found = []
    for average in (None, evener.ema(0.5)):
        with engine_of("batch_norm", average) as engine:
            losses = [engine.step(batch).loss for batch in engine.batches() if engine.evaluate()]
            found.append((losses, {n: v.clone() for n, v in engine.model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


def test_an_update_that_was_left_out_is_not_averaged() -> None:
    with engine_of("one_bad_target", evener.swa(), non_finite="skip") as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.guard.skipped == 2  # once an epoch
        assert engine.learner.average.updates == engine.steps_done - 2
        assert all(bool(value.isfinite().all()) for value in averages(engine).values())


def test_weights_of_half_precision_have_an_average_that_moves() -> None:
    task = replace(tasks.plain(), average=evener.ema(0.999))
    with Engine(task, RunConfig(device="cpu", dtype="bfloat16")) as engine:
        before = averages(engine)
        for batch in engine.batches():
            engine.step(batch)
        after = averages(engine)
        with engine.learner.average.shown():
            shown = dict(engine.model.named_parameters())["0.weight"].detach().clone()
    assert all(value.dtype == torch.float32 for value in after.values())
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    assert torch.equal(shown, after["0.weight"].bfloat16())


def test_a_loop_of_the_users_own_averages_once_a_step() -> None:
    with engine_of("plain", evener.ema(0.5)) as engine:
        for batch in engine.batches():
            micro = batch.micro_batches[0]
            total = nn.functional.cross_entropy(engine.model(micro.inputs), micro.targets, reduction="sum")
            engine.backward(total, len(micro.targets))
            engine.update()
        by_hand = averages(engine)
    with engine_of("plain", evener.ema(0.5)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert_close(by_hand, averages(engine))


# Evaluation and prediction


def test_it_is_evaluated_beside_the_weights_or_instead_of_them() -> None:
    with engine_of("batch_norm", evener.ema(0.9, start=1)) as engine:
        assert engine.evaluate().keys() == {"loss", "accuracy"}  # there is no average yet
        for batch in engine.batches():
            engine.step(batch)
        beside = engine.evaluate()
        assert beside.keys() == {"loss", "accuracy", "average.loss", "average.accuracy"}
        assert not math.isclose(beside["loss"], beside["average.loss"], rel_tol=1e-6)
        of_weights = engine.predict(engine.task.train)
        with engine.learner.average.shown():
            of_average = engine.predict(engine.task.train)
    with engine_of("batch_norm", evener.ema(0.9, start=1, instead=True)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.evaluate() == {name: beside[f"average.{name}"] for name in ("loss", "accuracy")}
        given = engine.predict(engine.task.train)
    assert torch.equal(given, of_average)  # type: ignore[arg-type]
    assert not torch.equal(given, of_weights)  # type: ignore[arg-type]


def test_weights_are_back_after_an_error_in_the_evaluation() -> None:
    with engine_of("plain", evener.ema(0.9)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        before = {name: value.clone() for name, value in engine.model.state_dict().items()}
        with pytest.raises(ValueError, match="no"), engine.learner.average.shown():
            raise ValueError("no")
        assert all(torch.equal(before[name], value) for name, value in engine.model.state_dict().items())


# Ranks


@pytest.mark.parametrize("row", spread(ROWS, ALWAYS, SLOW, SLOW))
def test_ranks_have_the_average_of_one_device_and_resume_it(
    ranks: Callable[[int], RankPool], row: str
) -> None:
    ranks(2).run(check_strategy, ROWS[row], without=[name for name in NAMES if name != "average"])


def of_steps(strategy: str, options: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, float]]:
    settings = {"strategy": strategy, "strategy_option": options, "epochs": 4}
    with engine_of("plain", evener.ema(0.6), **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return averages(engine), engine.evaluate()


@pytest.mark.parametrize(("strategy", "options"), [("local_sgd", ("sync_every=2",)), ("asynchronous", ())])
def test_merged_weights_are_averaged_alike_on_all_ranks(
    ranks: Callable[[int], RankPool], strategy: str, options: tuple[str, ...]
) -> None:
    first, second = ranks(2).run(of_steps, strategy, options)
    assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())
    assert first[1] == second[1]
    assert "average.loss" in first[1]


def of_a_whole_run(**settings: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The evaluations of weights and average in a run, where only updates write to the weights."""
    with engine_of("batch_norm", evener.ema(0.6), **settings) as engine:
        engine.learner.synchronizer.alone()
        for batch in engine.batches():
            engine.step(batch)
            found = engine.evaluate()
        return found, engine.evaluate()


def test_weights_that_ranks_have_in_common_are_averaged(ranks: Callable[[int], RankPool]) -> None:
    expected = of_a_whole_run()[0]
    for found in ranks(2).run(of_a_whole_run, strategy="sharded", strategy_option=("zero=2",)):
        for metrics in found:
            assert metrics == pytest.approx(expected, rel=1e-10)


# Checkpoints and export


def test_a_run_leaves_its_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = replace(tasks.batch_norm(), average=evener.ema(0.9))
    trained = fit(task, run_dir=tmp_path / "run", **ONE)
    assert "exponential moving average, decay 0.9; 12 averaged of 12 updates" in trained.summary.average
    assert trained.average.keys() == trained.weights.keys()
    assert main(["export", str(tmp_path / "run"), "--average"]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file.name == "step-00000012-average.safetensors"
    found = load_file(file)
    assert all(torch.equal(found[name], value) for name, value in trained.average.items())
    weights = load_file(export(tmp_path / "run"))
    assert all(torch.equal(weights[name], value) for name, value in trained.weights.items())
    assert not torch.equal(weights["0.weight"], found["0.weight"])
    assert torch.equal(weights["1.num_batches_tracked"], found["1.num_batches_tracked"])


def test_tied_weights_are_exported_under_each_name(tmp_path: Path) -> None:
    with engine_of("tokens", evener.ema(0.9)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        engine.save(tmp_path)
    found = load_file(export(tmp_path, tmp_path / "file.safetensors", average=True))
    assert torch.equal(found["out.weight"], found["embedding.weight"])


def test_a_checkpoint_without_an_average_has_none_to_export(tmp_path: Path) -> None:
    for average in (None, evener.ema(0.9, start=1000)):
        with engine_of("plain", average, steps=1) as engine:
            for batch in engine.batches():
                engine.step(batch)
            engine.save(tmp_path)
        with pytest.raises(ConfigurationError, match=r"has no average of the weights: .*Task.average"):
            export(tmp_path, tmp_path / "file", average=True)


def test_a_run_may_begin_or_leave_out_an_average_when_it_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    with engine_of("plain", None, steps=3) as engine:
        for batch in engine.batches():
            engine.step(batch)
        engine.save(tmp_path / "without")
    with engine_of("plain", evener.swa(start=2)) as engine:
        engine.load(tmp_path / "without", said.append)
        assert said == ["the checkpoint has no average of the weights: it begins here"]
        for batch in engine.batches():
            engine.step(batch)
        assert (engine.learner.average.updates, engine.learner.average.number) == (8, 5)
        engine.save(tmp_path / "with")
    with engine_of("plain", None) as engine:
        engine.load(tmp_path / "with", said.append)
        assert said[1:] == ["the checkpoint's average of the weights is left out: the task has none"]
    with engine_of("plain", evener.ema(0.9)) as engine:
        engine.load(tmp_path / "with", said.append)
        now, before = "exponential moving average, decay 0.9", "mean of the weights after the first 2"
        assert said[2:] == [f"the average of the weights goes on as {now}, and was begun as {before}"]


def kept_task(instead: bool = False) -> Task:
    return replace(tasks.plain(), average=evener.ema(0.9, instead=instead))


def test_an_evaluation_of_a_run_has_the_metrics_of_its_last_evaluation(tmp_path: Path) -> None:
    for instead in (False, True):
        run = tmp_path / str(instead)
        trained = fit(
            "tests.training.test_averages:kept_task", options={"instead": instead}, run_dir=run, **ONE
        )
        setup = InferenceSetup.from_run(run, "tests.training.test_averages:kept_task")
        found = evaluate_run(replace(setup, config=setup.config.replace(processes=1, device="cpu")))
        assert found.metrics.keys() == trained.summary.metrics.keys()
        for name, value in trained.summary.metrics.items():
            assert math.isclose(found.metrics[name], value, rel_tol=1e-6), name


def test_a_damaged_count_is_no_checkpoint(tmp_path: Path) -> None:
    from evener.checkpoint.structure import lacks

    with engine_of("plain", evener.ema(0.9), steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        engine.save(tmp_path)
    rest = torch.load(next(tmp_path.glob("step-*/rest.pt")), weights_only=True)
    assert not lacks(rest)
    assert lacks({**rest, "averaged": {"updates": -1, "number": 0}}) == "averaged"


# What is refused


def normalizes(averages: Any, weights: Any, number: int) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.add_(weight / weight.norm())


def returns(averages: Any, weights: Any, number: int) -> Any:
    return [0.9 * average + 0.1 * weight for average, weight in zip(averages, weights, strict=True)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(evener.ema, 1.0), r"decay of an average is 1.0; it must be at least 0 and below 1"),
        (partial(evener.ema, -0.1), "below 1"),
        (partial(evener.ema, math.nan), "below 1"),
        (partial(evener.ema, "0.9"), "'0.9'"),
        (partial(evener.swa, start=-1), "start of an average is -1; it must be a whole number of at least 0"),
        (partial(evener.swa, every=0), "every of an average is 0; it must be a whole number of at least 1"),
        (partial(evener.Average, 3), "update of an average is"),
        (partial(evener.Average, normalizes), "looks at several elements together"),
        (partial(evener.Average, returns), "must change the averages in place"),
        (partial(evener.Average, lambda averages, weights: None), "cannot be called with two lists"),
        (
            partial(tasks._task, average=0.999),
            r"Task.average is of type float, .* give evener.ema\(0.999\)",
        ),
        (partial(tasks._task, average=evener.ema), r"Task.average is ema itself"),
        (
            partial(tasks._task, average=evener.ema(), metrics={"average.loss": nn.L1Loss()}),
            "has 'average.loss'; with Task.average",
        ),
    ],
)
def test_what_is_no_average_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make()


def differing() -> str:
    decay = 0.9 + 0.01 * int(torch.distributed.get_rank())
    with pytest.raises(ConfigurationError) as caught:
        engine_of("plain", evener.ema(decay))
    return str(caught.value)


def test_ranks_that_average_differently_are_told(ranks: Callable[[int], RankPool]) -> None:
    for said in ranks(2).run(differing):
        assert "Task.average" in said


def test_the_record_of_a_run_names_both_metrics(tmp_path: Path) -> None:
    fit(kept_task(), run_dir=tmp_path, keep_best="average.loss", **ONE)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["kind"] == "evaluation"]
    assert all({"loss", "average.loss"} <= each.keys() for each in metrics)


def test_the_best_average_is_kept_although_it_begins_after_an_evaluation(tmp_path: Path) -> None:
    an_epoch = -(-len(kept_task().train) // kept_task().batch_size)  # type: ignore[arg-type]
    task = replace(kept_task(), average=evener.ema(0.9, start=an_epoch))
    fit(task, run_dir=tmp_path, keep_best="average.loss", epochs=2, **ONE)
    assert named(tmp_path / "checkpoints" / "best") == f"step-{2 * an_epoch:08}"
    with pytest.raises(ConfigurationError, match="the metrics are loss"):
        fit(task, run_dir=tmp_path / "misspelt", keep_best="average.los", epochs=1, **ONE)
