"""Workers that read for a run: the training is the same to the bit, whatever their number."""

from __future__ import annotations

import multiprocessing
import os
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from evener.core.config.run_config import RunConfig
from evener.data.loader import Loader
from evener.training.batches import feed
from evener.training.batches.progress import Progress
from evener.training.engine import Engine
from evener.training.fit import fit
from evener.training.step.step import Step
from tests import tasks
from tests.engines import Weights, copied

Trained = tuple[Weights, list[float], Any, set[int]]


class Whose(Dataset[Any]):
    """Another data set, and who has read it: 0 for the rank itself, or the number of a worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.dataset[index]
        info = get_worker_info()
        return (inputs, torch.tensor(info.id + 1 if info else 0)), target


def task_of(whose: set[int]) -> Any:
    task = tasks.plain()

    def forward(model: Any, inputs: Any) -> Any:
        whose.update(inputs[1].tolist())
        return model(inputs[0])

    return tasks.replace(task, train=Whose(task.train), evaluate=Whose(task.train), forward=forward)


def trained(workers: int, resumes: bool = False, **settings: Any) -> Trained:
    """Weights, losses, what an evaluation says, and who has read for this rank."""
    whose = set[int]()
    usual: dict[str, Any] = {"device": "cpu", "dtype": "float64", "batch_size": 5, "epochs": 1}
    config = RunConfig(**(usual | {"workers": workers} | settings))
    steps = list[Step]()
    # Ranks of the tests would start workers afresh, which takes seconds, and may have none.
    with (
        mock.patch.object(Loader, "__init__", partialmethod(Loader.__init__, start_method="fork")),
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]
    ):
        state: Any = None
        if resumes:
            with Engine(task_of(whose), config) as engine:
                for batch in engine.batches():
                    steps.append(engine.step(batch))
                    if engine.steps_done == 3:
                        state = engine.state_dict()
                        break
        with Engine(task_of(whose), config) as engine:
            if state is not None:
                engine.load_state_dict(state)
            steps += [engine.step(batch) for batch in engine.batches()]
            evaluated = engine.evaluate()
            engine.settle()
            return copied(engine), [step.loss for step in steps], evaluated, whose


def assert_bits(one: Trained, other: Trained) -> None:
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert one[1:3] == other[1:3]


def test_on_one_rank_every_bit_is_as_without_workers() -> None:
    found = trained(2, micro_batch=3)
    assert_bits(found, trained(0, micro_batch=3))
    assert found[3] == {1, 2}


@pytest.mark.parametrize("settings", [{"balance": "3,1"}, {"resumes": True}])
def test_on_two_ranks_every_bit_is_as_without_workers(ranks: Any, settings: dict[str, Any]) -> None:
    found = ranks(2).run(trained, 1, **settings)
    for one, other in zip(found, ranks(2).run(trained, 0, **settings), strict=True):
        assert_bits(one, other)
        assert (one[3], other[3]) == ({1}, {0})


def lookahead() -> int:
    """Steps ahead of which shares are decided, where rank 1 alone has workers, as it may."""
    config = RunConfig(device="cpu", workers=3 * int(os.environ["RANK"]), steps=2)
    spied = mock.patch.object(feed, "balancer_of", wraps=feed.balancer_of)
    with Engine(tasks.plain(), config) as engine, spied as made:
        engine.feed.open(engine.progress).close()
        found: int = made.call_args.args[2]
        return found - engine.step_sync.steps_late - 1


def test_shares_are_decided_alike_for_the_rank_that_reads_furthest_ahead(ranks: Any) -> None:
    assert ranks(2).run(lookahead) == [6, 6]


def test_the_summary_has_the_workers_of_each_rank() -> None:
    task = tasks.replace(tasks.plain(), evaluate=None)
    run = fit(task, processes=1, device="cpu", workers=1, batch_size=6, steps=2, show=False)
    assert run.summary.workers == [1]


@pytest.mark.parametrize(("sync_every", "rounds"), [(1, 10), (3, 5), (4, 3), (100, 3)])
@pytest.mark.parametrize("strategy", ["local_sgd", "asynchronous"])
def test_steps_are_batches_also_where_an_epoch_ends_a_round(
    strategy: str, sync_every: int, rounds: int
) -> None:
    """An epoch has four batches: of ten, eight are two epochs."""
    settings: dict[str, Any] = {"strategy": strategy, "strategy_option": (f"sync_every={sync_every}",)}
    with Engine(tasks.plain(), device="cpu", steps=10, **settings) as engine:
        taken = sum(1 for batch in engine.batches() if engine.step(batch))
        assert taken == engine.total_steps == rounds


def test_steps_are_batches_also_after_a_section_that_ended_early() -> None:
    """Two batches of the second epoch are left of it in one section, and two of the third are in the last."""
    settings: dict[str, Any] = {"strategy": "asynchronous", "strategy_option": ("sync_every=3",)}
    with Engine(tasks.plain(), device="cpu", steps=10, **settings) as engine:
        engine.feed._start = Progress(epoch=1, position=26, steps=3)
        assert engine.feed.last_step == 5


def further_steps(directory: Path, steps: int, **settings: Any) -> tuple[int, int]:
    """The steps and samples of a run that goes on from a checkpoint, if there is one, up to ``steps`` batches."""
    with Engine(tasks.plain(), device="cpu", steps=steps, **settings) as engine:
        if directory.exists():
            engine.load(directory)
        taken = sum(1 for batch in engine.batches() if engine.step(batch))
        engine.save(directory)
        return taken, engine.samples_done


def test_a_run_goes_on_with_rounds_of_another_length(tmp_path: Path) -> None:
    """Each leg ends with an epoch of four batches of 47 samples, but for the last."""
    local = {"strategy": "local_sgd"}
    assert further_steps(tmp_path / "run", 8, strategy="single") == (8, 94)
    assert further_steps(tmp_path / "run", 12, **local, strategy_option=("sync_every=2",)) == (2, 141)
    assert further_steps(tmp_path / "run", 18, **local, strategy_option=("sync_every=3",)) == (3, 227)
    assert further_steps(tmp_path / "run", 22, strategy="single") == (3, 261)
