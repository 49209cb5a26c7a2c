"""A sample that cannot be read is left out of the sum, on any number of ranks alike."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, DataError
from evener.strategies import DataParallel
from evener.training.engine import Engine
from evener.training.fit import fit
from tests import tasks
from tests.comparing import worst
from tests.engines import assert_same, copied
from tests.tiers import ALWAYS, NIGHTLY, crossed

BAD = (3, 11, 40, 46)


class Torn(Dataset[Any]):
    def __init__(self, dataset: Any, bad: tuple[int, ...] = BAD) -> None:
        self.dataset, self.bad = dataset, bad

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError("torn")
        return self.dataset[index]


def torn(name: str, bad: tuple[int, ...] = BAD) -> Any:
    task = getattr(tasks, name)()
    return tasks.replace(task, train=Torn(task.train, bad), evaluate=Torn(task.train, bad))


def trained(
    name: str, bad: tuple[int, ...] = BAD, **settings: Any
) -> tuple[Any, list[tuple[float, int]], int]:
    usual = {"dtype": "float64", "device": "cpu", "on_bad_sample": "skip", "batch_size": 13}
    with Engine(torn(name, bad), RunConfig(**(usual | settings))) as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
        evaluated = engine.evaluate()
        engine.settle()
        return engine.learner.state_dict()["model"], [(step.loss, step.skipped) for step in steps], evaluated


DIVISIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "equal": (2, {}),
    "idle rank": (3, {"balance": "5,1,0"}),
    "accumulated": (2, {"micro_batch": 5}),
    "sharded": (2, {"strategy": "sharded"}),
}


@pytest.mark.filterwarnings("ignore:no target of the batch of step")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("batch_norm", {"strategy": DataParallel("cpu:0,cpu:1", "1,3")}),
        ("plain", {"strategy": DataParallel("cpu:0,cpu:1,cpu:2"), "micro_batch": 5}),
        ("costly", {"strategy": DataParallel("cpu:0,cpu:1", "auto")}),
        ("plain", {"strategy": DataParallel("cpu:0,cpu:1"), "batch_size": 1}),
    ],
    ids=str,
)
def test_devices_of_one_process_divide_the_samples_that_could_be_read(
    name: str, settings: dict[str, Any]
) -> None:
    alone, steps, evaluated = trained(name, **settings | {"strategy": "single"})
    weights, divided, metrics = trained(name, **settings)
    assert worst(alone, weights) < 1e-9
    assert [skipped for _, skipped in divided] == [skipped for _, skipped in steps]
    assert metrics == pytest.approx(evaluated)


@pytest.mark.parametrize(
    ("name", "division"), crossed(["plain", "batch_norm"], list(DIVISIONS), lambda task: (ALWAYS, NIGHTLY))
)
def test_the_sum_stays_exact_on_any_number_of_ranks(ranks: Any, name: str, division: str) -> None:
    size, settings = DIVISIONS[division]
    alone, steps, evaluated = trained(
        name, **{key: value for key, value in settings.items() if key == "micro_batch"}
    )
    assert sum(skipped for _, skipped in steps) == 2 * len(BAD)
    for weights, divided, metrics in ranks(size).run(trained, name, **settings):
        assert_same(alone, weights, 1e-11)
        assert [skipped for _, skipped in divided] == [skipped for _, skipped in steps]
        assert [loss for loss, _ in divided] == pytest.approx([loss for loss, _ in steps], rel=1e-11)
        assert metrics == pytest.approx(evaluated, rel=1e-11)


def test_it_is_as_if_the_sample_were_not_there() -> None:
    """The one batch of an epoch with all samples, and with those alone that can be read."""
    one = {"batch_size": 47, "epochs": 1}
    weights, ((loss, skipped),), metrics = trained("plain", **one)
    task = tasks.plain()
    good = Subset(task.train, [n for n in range(47) if n not in BAD])
    with Engine(
        tasks.replace(task, train=good, evaluate=good), dtype="float64", device="cpu", **one
    ) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        assert_same(copied(engine), weights, 1e-13)
        assert engine.evaluate() == pytest.approx(metrics, rel=1e-13)
    assert (losses, skipped) == ([pytest.approx(loss, rel=1e-13)], 4)


def test_a_run_tells_of_what_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = fit(
        torn("plain"), run_dir=tmp_path, processes=1, device="cpu", epochs=1, on_bad_sample="skip"
    ).summary
    assert (summary.samples, summary.skipped) == (47, 4)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if record["kind"] == "skipped"]
    assert {entry["sample"] for entry in record["samples"]} == set(BAD)
    assert "OSError: torn" in record["samples"][0]["why"]
    assert sum(record.get("skipped", 0) for record in records) == 4
    (evaluation,) = [record for record in records if record["kind"] == "evaluation"]
    assert evaluation["samples"] == 43
    shown = capsys.readouterr().err
    assert shown.count("rank 0 skips sample") == 8
    assert "epoch 1: 4 samples could not be read and were skipped" in shown


def fails(settings: dict[str, Any], bad: tuple[int, ...]) -> str:
    try:
        trained("plain", bad, **settings)
    except (DataError, ConfigurationError) as error:
        return str(error)
    return ""


def test_too_many_end_the_run_on_all_ranks(ranks: Any) -> None:
    for told in ranks(2).run(fails, {"batch_size": 4}, tuple(range(0, 47, 4))):
        assert told.startswith("5 of the 47 samples of epoch 1 could not be read, more than 10%")
        assert "sample " in told


def test_samples_of_batches_that_are_taken_again_count_once(tmp_path: Path) -> None:
    with Engine(torn("plain"), device="cpu", on_bad_sample="skip", batch_size=13) as engine:
        engine.save(tmp_path)
        for _ in range(2):
            for batch in islice(engine.batches(), 4):
                engine.step(batch)
            engine.load(tmp_path)
        (record,) = engine.skips.record(0, 0)
        assert sorted(entry["sample"] for entry in record.samples) == sorted(BAD)


def test_ranks_that_read_the_same_samples_do_not_skip(ranks: Any) -> None:
    for told in ranks(2).run(fails, {"strategy": "tensor"}, ()):
        assert "several ranks the same samples, which might not skip the same" in told


def test_predictions_are_not_skipped() -> None:
    task = torn("plain")
    with (
        Engine(task, device="cpu", on_bad_sample="skip") as engine,
        pytest.raises(DataError, match="reading sample 3 of the evaluation set"),
    ):
        engine.predict(task.train)


def test_by_default_a_run_stops() -> None:
    with pytest.raises(DataError, match="reading sample"):
        trained("plain", on_bad_sample="stop")
    assert torch.is_grad_enabled()
