"""Workers that are chosen: the same training to the bit, and what is said of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.data.loader import Loader
from evener.data.worker_tuning import Choice
from evener.training.batches import feed
from evener.training.batches import worker_processes as readers
from evener.training.batches.worker_processes import Readers, waiting_words, why_not
from evener.training.engine import Engine
from evener.training.fit import fit
from evener.training.step.step import Step
from tests import tasks
from tests.engines import Weights, copied


class Planned(Choice):
    """Takes one worker, then two, then none again, whatever the times are."""

    def __init__(self, most: int, who: str) -> None:
        super().__init__(2, who)
        self._step = 0

    def add(self, waited: float, rest: float) -> None:
        self._step += 1
        wanted = {2: 1, 4: 2, 8: 0}.get(self._step, self.workers)
        if wanted != self.workers:
            self.workers = wanted
            self._say(f"reads with {wanted}")


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def task_of(whose: set[int]) -> Any:
    task = tasks.plain()

    def forward(model: Any, inputs: Any) -> Any:
        whose.update(inputs[1].tolist())
        return model(inputs[0])

    return tasks.replace(task, train=Whose(task.train), evaluate=Whose(task.train), forward=forward)


def trained(
    workers: Any, resumes: bool = False, **settings: Any
) -> tuple[Weights, list[float], Any, set[int]]:
    """Weights, losses, what an evaluation says, and who has read for this rank."""
    whose = set[int]()
    config = RunConfig(
        **({"device": "cpu", "dtype": "float64", "workers": workers, "batch_size": 5, "epochs": 1} | settings)
    )
    steps = list[Step]()
    # Ranks of the tests would start workers afresh, which takes seconds, and may have none.
    with (
        mock.patch.object(Loader, "__init__", partialmethod(Loader.__init__, start_method="fork")),
        mock.patch.object(readers, "Choice", Planned),
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


def assert_bits(
    one: tuple[Weights, list[float], Any, set[int]], other: tuple[Weights, list[float], Any, set[int]]
) -> None:
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert one[1:3] == other[1:3]


def test_on_one_rank_every_bit_is_as_without_workers() -> None:
    found = trained("auto", micro_batch=3)
    assert_bits(found, trained(0, micro_batch=3))
    assert found[3] == {0, 1, 2}


@pytest.mark.parametrize("settings", [{"balance": "3,1"}, {"resumes": True}])
def test_on_two_ranks_every_bit_is_as_without_workers(ranks: Any, settings: dict[str, Any]) -> None:
    found = ranks(2).run(trained, "auto", **settings)
    for one, other in zip(found, ranks(2).run(trained, 0, **settings), strict=True):
        assert_bits(one, other)
        assert one[3] == {0, 1, 2}
        assert other[3] == {0}


def lookahead() -> int:
    """Steps ahead of which shares are decided, where rank 1 alone has workers, as it may."""
    config = RunConfig(device="cpu", workers=3 * int(os.environ["RANK"]), steps=2)
    spied = mock.patch.object(feed, "balancer_of", wraps=feed.balancer_of)
    with Engine(tasks.plain(), config) as engine, spied as made:
        engine.feed.open(engine.progress).close()
        found: int = made.call_args.args[2]
        return found - engine.ledger.steps_late - 1


def test_shares_are_decided_alike_for_the_rank_that_reads_furthest_ahead(ranks: Any) -> None:
    assert ranks(2).run(lookahead) == [6, 6]


class Events(Observer):
    def __init__(self) -> None:
        self.words: list[str] = []

    def event(self, record: Any) -> None:
        self.words.append(record.words)


def told_of_daemons() -> list[str]:
    events = Events()
    with Engine(
        tasks.plain(), RunConfig(device="cpu", workers="auto", steps=2), observers=[events]
    ) as engine:
        for batch in engine.batches():
            engine.step(batch)
        engine.evaluate(tasks.plain().train)
        engine.evaluate(tasks.plain().train)
        engine.tell()
        assert engine.feed.readers.count == 0
    return events.words


def test_a_daemonic_rank_stays_without_workers_and_says_so_once(ranks: Any) -> None:
    first, second = ranks(2).run(told_of_daemons)
    assert second == []
    assert first == [
        f"rank 0 reads the {name} set without workers: this process is daemonic and may have none: start ranks with "
        "evener, torchrun or srun"
        for name in ("training", "evaluation")
    ]


def test_another_rank_tells_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    session: Any = mock.Mock(rank=1)
    session.environment.host = "a"
    session.control.gather_objects = lambda own: [own, own]
    found = Readers(RunConfig(workers="auto"), session)
    assert found.of_training(Stream()) == 0
    assert found.new_words() == []
    assert capsys.readouterr().err.startswith(
        "evener: rank 1 reads the training set without workers: the data set is"
    )


def test_the_number_of_an_iterable_data_set_is_not_chosen() -> None:
    assert why_not(Stream()).startswith("the data set is iterable, and their number decides about its order")
    assert why_not([1]) == ""


def test_an_evaluation_goes_on_with_what_the_last_one_had() -> None:
    session: Any = mock.Mock(rank=0)
    session.environment.host = "a"
    session.control.gather_objects = lambda own: [own]
    found, one, other = Readers(RunConfig(workers="auto"), session), [1], [2]
    choice = found.of_evaluation(one)
    assert isinstance(choice, Choice)
    assert found.of_evaluation(one) is choice
    assert found.of_evaluation(other) is not choice
    assert found.count == 0
    training = found.of_training(one)
    assert found.of_training(one) is training
    assert training is not choice
    assert Readers(RunConfig(workers=3), session).of_evaluation(one) == 3


def test_a_run_tells_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "Choice", Planned)
    events = Events()
    run = fit(
        tasks.replace(tasks.plain(), evaluate=None),
        processes=1,
        device="cpu",
        workers="auto",
        batch_size=6,
        steps=7,
        show=False,
        observers=[events],
    )
    assert events.words == ["rank 0 reads with 1", "rank 0 reads with 2"]
    assert run.summary.workers == [2]


@pytest.mark.parametrize(
    ("waited", "workers", "why", "words"),
    [
        ([1.0, 4.0], 2, "no core", "rank 1 waited for batches 40% of the time, with 2 workers: no core"),
        ([3.0, 1.0], 0, "", "rank 0 waited for batches 30% of the time, without workers"),
        ([0.5, 0.9], 1, "no core", ""),
    ],
)
def test_the_summary_names_who_waited(waited: list[float], workers: int, why: str, words: str) -> None:
    parts = [{"times": {"input_seconds": s}, "workers": workers, "why_waits": why} for s in waited]
    assert waiting_words(parts, 10.0) == words
    assert waiting_words(parts, 0.0) == ""


def test_who_leaves_the_number_open_is_told_of_auto() -> None:
    session: Any = mock.Mock(rank=0)
    session.environment.host = "a"
    session.control.gather_objects = lambda own: [own]
    assert "--workers auto" in Readers(RunConfig(), session).why_waits
    assert Readers(RunConfig(workers=2), session).why_waits == ""
    auto = Readers(RunConfig(workers="auto"), session)
    assert isinstance(auto.of_training([1]), Choice)
    assert auto.why_waits
