from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evener.checkpoint.digest import weights_digest
from evener.components.amp.policy import Precision
from evener.core.config.strategy_names import STRATEGIES as NAMES
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.errors import ConfigurationError, DataError, TaskError
from evener.strategies.description import describe
from evener.strategies.exact_bits import STRATEGIES, check_alike, check_strategy
from evener.strategies.registry import strategy_called
from evener.training.engine import Engine
from tests import tasks
from tests.ranks import RankPool

ABLE = ("single", "ddp", "sharded")
NORMS: Any = {"exact": "bits", "batch_norm": "grain", "device": "cpu"}


class Drawing(nn.Module):
    """Draws random numbers of torch's generator, and normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) if self.training else 0.5
        out: Tensor = self.layers(x + noise)
        return out


def drawing() -> Task:
    data = TensorDataset(tasks.draws(50, 6), tasks.classes(50, 3))
    return replace(tasks.plain(), model=Drawing, train=data, evaluate=data, batch_size=24)


def test_every_strategy_is_able_or_has_a_reason() -> None:
    assert {*ABLE} | STRATEGIES.keys() == NAMES.keys()
    assert not {*ABLE} & STRATEGIES.keys()
    assert not any(strategy_called(name).sums_bits for name in STRATEGIES)
    assert all(strategy_called(name).sums_bits for name in ABLE)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_that_depend_on_the_division_are_refused(name: str) -> None:
    strategy, words = strategy_called(name), f"exact=bits does not go with strategy '{name}': "
    raises = pytest.raises(ConfigurationError, match=f"{words}.*; use single, ddp or sharded")
    with Session(device="cpu", environment=Environment()) as session, raises:
        check_strategy(strategy.label, strategy.sums_bits, Precision(), tasks.plain(), session)


def test_data_that_ranks_hold_apart_and_scaled_losses_are_refused() -> None:
    with Session(device="cpu", environment=Environment()) as session:
        with pytest.raises(ConfigurationError, match=r"does not go with Task.partition='sample'"):
            check_strategy("ddp", True, Precision(), replace(tasks.plain(), partition="sample"), session)
        with pytest.raises(ConfigurationError, match=r"does not go with precision fp16: .*use bf16"):
            check_strategy("ddp", True, Precision.from_settings("fp16", ()), tasks.plain(), session)


@pytest.mark.parametrize(
    ("what", "values", "words"),
    [
        ("number of threads", ("2", "1", "2"), "2 on rank 0, 2, 1 on rank 1"),
        ("device", ("A", "A", "B"), "A on rank 0, 1, B on rank 2"),
    ],
)
def test_ranks_that_round_differently_are_refused(what: str, values: tuple[str, ...], words: str) -> None:
    check_alike([{what: "1"}, {what: "1"}])
    with pytest.raises(ConfigurationError, match=f"ranks that differ in their {what}: {words}"):
        check_alike([{what: value} for value in values])


def step(task: Task, **settings: Any) -> None:
    with Engine(task, exact="bits", device="cpu", **settings) as engine:
        engine.step(next(engine.batches()))


class Writes(nn.Module):
    """Counts its forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x


class Own(nn.BatchNorm1d):
    pass


class Looks(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 6, **options)


@pytest.mark.parametrize(
    ("layer", "settings", "words"),
    [
        (lambda: nn.BatchNorm1d(6), {}, "0, a BatchNorm1d: .*say batch_norm=grain"),
        (lambda: Own(6), {"batch_norm": "grain"}, "0, a Own: it is a class of its own"),
        (lambda: Writes(), {}, "buffer 0.passes: .*once for each grain"),
        (lambda: nn.utils.spectral_norm(nn.Linear(6, 6)), {}, "buffer 0.weight_u"),
        (lambda: Looks(max_norm=1.0), {}, "0.words, a Embedding: max_norm and"),
        (lambda: Looks(sparse=True), {}, "0.words, a Embedding: sparse gradients"),
    ],
)
def test_modules_that_depend_on_the_division_are_refused(
    layer: Callable[[], nn.Module], settings: dict[str, Any], words: str
) -> None:
    task = replace(tasks.plain(), model=lambda: nn.Sequential(layer(), nn.Linear(6, 3)))
    with pytest.raises(TaskError, match=f"exact=bits does not go with {words}"):
        step(task, **settings)


def test_an_operation_without_a_deterministic_algorithm_is_named() -> None:
    class Puts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone().put_(torch.tensor([0, 0]), torch.ones(2)))

    task = replace(tasks.plain(), model=lambda: Puts(6, 3))
    with pytest.raises(TaskError, match=r"deterministic algorithms alone, and PyTorch has none.*put_"):
        step(task)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_loop_of_ones_own_is_refused() -> None:
    with Engine(tasks.plain(), exact="bits", device="cpu") as engine:
        next(engine.batches())
        with pytest.raises(ConfigurationError, match=r"exact=bits goes with engine.step\(batch\)"):
            engine.backward(torch.zeros((), requires_grad=True), 1)


# Divisions


def first_step(**settings: Any) -> tuple[dict[int | None, float], dict[str, Tensor], float]:
    """Of this rank's grains the losses in the first step; the buffers after it; and a number drawn afterwards."""
    found: dict[int | None, float] = {}
    with Engine(drawing(), **(NORMS | settings)) as engine:
        stepper: Any = engine.learner.stepper
        usual = stepper._pass

        def noted(micro: Any, *rest: Any) -> Any:
            total = usual(micro, *rest)
            if micro.weight:
                found[micro.position] = total.value()
            return total

        stepper._pass = noted
        torch.manual_seed(7)
        engine.step(next(engine.batches()))
        drawn = float(torch.rand(()))
        return found, {name: value.clone() for name, value in engine.model.named_buffers()}, drawn


def test_random_numbers_depend_on_the_grain_alone(ranks: Callable[[int], RankPool]) -> None:
    alone, buffers, drawn = first_step(grain=3)
    assert sorted(alone, key=str) == sorted(range(0, 24, 3), key=str)
    for world_size, balance in ((2, "equal"), (3, "3,1,1"), (3, "1,0,2")):
        of_ranks = ranks(world_size).run(first_step, grain=3, balance=balance)
        there = {place: loss for own, *_ in of_ranks for place, loss in own.items()}
        assert there == alone
        for _, found, number in of_ranks:
            assert number == drawn, "the generator does not depend on the number of grains"
            assert all(torch.equal(found[name], value) for name, value in buffers.items())


def test_grains_draw_different_numbers() -> None:
    same = TensorDataset(torch.ones(24, 6), torch.zeros(24, dtype=torch.int64))
    task = replace(drawing(), train=same, model=lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)))
    losses = set()
    with Engine(task, **NORMS, grain=4, steps=1) as engine:
        stepper: Any = engine.learner.stepper
        usual = stepper._pass
        stepper._pass = lambda *given: losses.add(usual(*given).value()) or usual(*given)
        engine.step(next(engine.batches()))
    assert len(losses) == 6


def evaluated(**settings: Any) -> tuple[dict[str, float], Tensor | None]:
    task = drawing()
    with Engine(task, **(NORMS | settings)) as engine:
        assert task.evaluate is not None
        return engine.evaluate(), engine.predict(task.evaluate)


def test_evaluation_is_cut_by_position(ranks: Callable[[int], RankPool]) -> None:
    metrics, outputs = evaluated(grain=3)
    there = ranks(2).run(evaluated, grain=3, balance="3,1")
    assert there[0][0]["accuracy"] == metrics["accuracy"]
    assert torch.equal(there[0][1], outputs)


def test_samples_that_draw_from_a_generator_of_their_own_are_refused() -> None:
    class Own(TensorDataset):
        draws = torch.Generator().manual_seed(0)

        def __getitem__(self, index: int) -> Any:
            inputs, target = super().__getitem__(index)
            return inputs + torch.rand(6, generator=self.draws), target

    class Global(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            inputs, target = super().__getitem__(index)
            return inputs + torch.rand(6), target

    parts = tasks.draws(50, 6), tasks.classes(50, 3)
    step(replace(tasks.plain(), train=Global(*parts)))
    with pytest.raises(DataError, match="does not give the same sample for one index"):
        step(replace(tasks.plain(), train=Own(*parts)))


def test_the_record_says_what_the_bits_depend_on() -> None:
    with Engine(drawing(), **NORMS, grain=4, block=2) as engine:
        about = describe(engine.learner)
    assert about["exact"].startswith(
        "exact in bits: grains of 4 samples, blocks of 2 grains, grid of 47 bits; "
    )
    assert about["exact"].endswith(", 1 thread")
    assert about["batch_norm"] == "BatchNorm by each grain's own samples (batch_norm=grain)"
    with Engine(tasks.plain(), device="cpu") as engine:
        assert describe(engine.learner)["exact"] == ""


class Recurrent(nn.Module):
    """An LSTM over words, padded in each grain, with dropout and normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(12, 6), nn.LSTM(6, 8, batch_first=True)
        self.last = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, words: Tensor) -> Tensor:
        states = self.cells(self.words(words))[0] * (words > 0).unsqueeze(-1)
        classes: Tensor = self.last(states.sum(1))
        return classes


class Sentences(Dataset[Any]):
    """Sentences of different lengths, with words that are left out at random."""

    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, 12, (2 + index % 9,), generator=generator)
        kept = torch.rand(len(words)) > 0.2
        kept[0] = True
        return words[kept], index % 3


def padded(items: list[Any]) -> tuple[Tensor, Tensor]:
    words, classes = zip(*items, strict=True)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(classes)


def sentences() -> Task:
    return replace(tasks.plain(), model=Recurrent, train=Sentences(), evaluate=Sentences(), collate=padded)


class Torn(Sentences):
    """Sentences of which two that stand together in a grain, and others, cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index % 11 == 3:
            raise OSError("torn")
        return super().__getitem__(index)


def torn() -> Task:
    return replace(sentences(), train=Torn(), evaluate=None)


def costly_sentences() -> Task:
    return replace(sentences(), cost=lambda index: 2.0 + index % 9)


def streamed() -> Task:
    return replace(tasks.stream(), evaluate=None)


TASKS = {task.__name__: task for task in (sentences, costly_sentences, streamed, torn)}


def ended(name: str, **settings: Any) -> tuple[str, dict[str, float], list[tuple[int, ...]]]:
    task, shares = TASKS[name](), []
    usual: Any = {"exact": "bits", "device": "cpu", "batch_size": 32, "grain": 4, "block": 2, "steps": 6}
    usual |= {"batch_norm": "grain"} if task.model is Recurrent else {}
    with Engine(task, **(usual | settings)) as engine:
        for batch in engine.batches():
            shares.append(batch.shares)
            engine.step(batch)
        metrics = {} if task.evaluate is None else engine.evaluate()
        return weights_digest(engine.learner.tensors()), metrics, shares


@pytest.mark.parametrize("name", ["sentences", "costly_sentences", "streamed"])
def test_random_shares_and_random_data_leave_the_bits_alone(
    ranks: Callable[[int], RankPool], name: str
) -> None:
    digest, metrics, _ = ended(name)
    for world_size in (2, 3):
        for found in ranks(world_size).run(ended, name, balance="tests.balancers:Random"):
            assert found[:2] == (digest, metrics)
        assert len(set(found[2])) > 2, "shares differ from step to step"
    assert ended(name, seed=1)[0] != digest


def test_ranks_that_gather_weights_in_each_pass_fill_up_with_placeholders(
    ranks: Callable[[int], RankPool],
) -> None:
    digest, metrics, _ = ended("sentences")
    sharded: Any = {"strategy": "sharded", "strategy_option": ("zero=3",)}
    for found in ranks(3).run(ended, "sentences", balance="tests.balancers:Random", **sharded):
        assert found[:2] == (digest, metrics)


def test_workers_leave_the_bits_alone() -> None:
    assert ended("sentences", steps=3, workers=2)[0] == ended("sentences", steps=3)[0]


def test_a_sample_that_cannot_be_read_is_left_out_of_its_grain(ranks: Callable[[int], RankPool]) -> None:
    digest, *_ = ended("torn", on_bad_sample="skip")
    for found in ranks(2).run(ended, "torn", on_bad_sample="skip", balance="3,1"):
        assert found[0] == digest
