"""Streams and shards in whole trainings: the same on any number of ranks, also after a resume on another number."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from evener.data.shard_counts import COUNTS
from evener.data.sharded import ShardedDataset
from evener.errors import ConfigurationError
from evener.strategies.dataset_view import Reading
from evener.training.engine import Engine
from evener.training.fit import fit
from tests import tasks
from tests.engines import Weights, assert_same, copied, engine_of
from tests.observers import Remembering

Samples = list[list[float]]


def trained(
    name: str, place: Path, steps: int | None = None, resume: bool = False, **settings: Any
) -> tuple[Samples, Weights]:
    """The first feature of this rank's samples in each step, and the weights. Saves at the end."""
    may_fork = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with may_fork, engine_of(name, seed=5, **settings) as engine:
        if resume:
            engine.load(place, tell=lambda message: None)
        seen: Samples = []
        for batch in itertools.islice(engine.batches(), steps):
            seen.append(
                [x for micro in batch.micro_batches if micro.weight for x in micro.inputs[:, 0].tolist()]
            )
            engine.step(batch)
        engine.save(place)
        return seen, copied(engine)


def together(found: list[tuple[Samples, Weights]]) -> Samples:
    """The samples of each step, over all ranks."""
    return [
        sorted(itertools.chain.from_iterable(step)) for step in zip(*(each[0] for each in found), strict=True)
    ]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sharded", "resumable"])
def test_a_run_on_changing_ranks_is_that_of_one(ranks: Any, tmp_path: Path, name: str, workers: int) -> None:
    reference, weights = trained(name, tmp_path / "one")
    place = tmp_path / "several"
    on_two = ranks(2).run(trained, name, place, 6, workers=workers, balance="2,1")
    on_three = ranks(3).run(trained, name, place, 3, True, workers=workers, balance="1,0,5")
    on_one = [trained(name, place, None, True, workers=workers)]
    parts = [together(found) for found in (on_two, on_three, on_one)]
    assert [len(part) for part in parts] == [6, 3, len(reference) - 9]
    assert sum(parts, []) == [sorted(step) for step in reference]  # noqa: RUF017
    assert_same(on_one[0][1], weights)


@pytest.mark.parametrize("strategy", ["sharded", "local_sgd", "asynchronous"])
def test_shards_go_with_other_strategies(ranks: Any, tmp_path: Path, strategy: str) -> None:
    samples = sum(tasks.SHARDS)
    for done in ranks(2).run(samples_done, strategy=strategy):
        assert done == 2 * samples


def samples_done(**settings: Any) -> int:
    with engine_of("sharded", dtype="float32", **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.samples_done


def evaluated() -> dict[str, float]:
    with engine_of("sharded") as engine:
        return engine.evaluate()


def test_an_evaluation_counts_each_sample_of_shards_once(ranks: Any) -> None:
    alone = evaluated()
    for found in ranks(3).run(evaluated):
        assert found == pytest.approx(alone, rel=1e-12)


def test_a_run_counts_once_and_keeps_the_counts(tmp_path: Path) -> None:
    trained_once = fit(tasks.sharded, processes=1, show=False, run_dir=tmp_path / "run", steps=3)
    assert trained_once.summary.samples == 39
    counts = json.loads((tmp_path / "run" / COUNTS).read_text())
    assert [counts[str(shard)] for shard in range(6)] == [[length] for length in tasks.SHARDS]


def own_parts() -> tuple[int, list[float], int]:
    """Each rank has shards of its own. Returns the samples of all, those of this rank's parts, and the seed's order."""
    rank = torch.distributed.get_rank()

    def shards() -> Any:
        task = tasks.sharded()
        own = [shard for shard in range(6) if shard % 2 == rank]
        data = ShardedDataset(own, tasks.rows_of, together=2)
        return replace(task, train=data, evaluate=None, partition="sample", epochs=1)

    with Engine(shards(), device="cpu") as engine:
        reading = Reading.from_learner(engine.learner, engine.task.train, "training set")
        order = reading.shuffled(0)
        seen = []
        for batch in engine.batches():
            seen += [x for micro in batch.micro_batches if micro.weight for x in micro.inputs[:, 0].tolist()]
            engine.step(batch)
        return engine.samples_done, seen, type(order).__name__ == "ShardOrder"


def test_ranks_with_shards_of_their_own(ranks: Any) -> None:
    found = ranks(2).run(own_parts)
    expected = [
        x for shard in range(6) for x in tasks.draws(tasks.SHARDS[shard], 6, seed=shard)[:, 0].tolist()
    ]
    assert sorted(found[0][1] + found[1][1]) == sorted(expected)
    assert [each[::2] for each in found] == [(sum(tasks.SHARDS), True)] * 2


def test_an_endless_stream_needs_a_number_of_steps() -> None:
    class Endless(tasks.Stream):
        endless = True

        def __iter__(self) -> Any:
            while True:
                yield from super().__iter__()

    task = replace(tasks.stream(), train=Endless())
    with pytest.raises(ConfigurationError, match="give the run a number of steps"):
        Engine(task, device="cpu")
    with Engine(task, device="cpu", steps=9) as engine:
        assert sum(1 for batch in engine.batches() if engine.step(batch)) == 9


class Continued(tasks.Resumable):
    """Begins where it is, as a reader of a file does."""

    def __iter__(self) -> Any:
        for number in range(self.at, self.samples):
            self.at = number + 1
            yield self.inputs[number], self.targets[number]
        self.at = 0


def test_a_stream_is_evaluated_whole_though_training_on_it_has_read_ahead() -> None:
    seen = Remembering()
    task, stream = tasks.resumable(), Continued()
    shared = fit(
        replace(task, train=stream, evaluate=stream),
        processes=1,
        device="cpu",
        show=False,
        epochs=2,
        observers=[seen],
    )
    assert [found.samples for kind, found in seen.told if kind == "evaluation"] == [
        shared.summary.samples // 2
    ] * 2
    alone = fit(
        replace(task, train=Continued(), evaluate=None), processes=1, device="cpu", show=False, epochs=2
    )
    assert_same(shared.weights, alone.weights)


def test_a_run_that_replaces_another_counts_anew(tmp_path: Path) -> None:
    folder, task = tmp_path / "run", tasks.sharded()
    own = {"processes": 1, "device": "cpu", "show": False, "run_dir": folder, "steps": 1}
    fit(task, **own)
    halved = ShardedDataset(range(6), half_of, together=2)
    fit(replace(task, train=halved, evaluate=None), **own, overwrite=True)
    counts = json.loads((folder / COUNTS).read_text())
    assert [counts[str(shard)] for shard in range(6)] == [[-(-length // 2)] for length in tasks.SHARDS]


def half_of(shard: int) -> Any:
    return itertools.islice(tasks.rows_of(shard), 0, None, 2)
