"""An order of the task's own: every division has its samples, and what cannot be an order is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.data.sampler import ListedOrder
from evener.data.sharded import ShardedDataset
from evener.errors import ConfigurationError
from evener.training.engine import Engine
from tests import tasks


def backwards(epoch: int) -> range:
    """Seven of the samples, from another one in each epoch."""
    return range(6 + epoch, epoch - 1, -1)


@dataclasses.dataclass
class Backwards:
    """An object that can be called, and has no hash."""

    last: int = 6

    def __call__(self, epoch: int) -> range:
        return range(self.last + epoch, epoch - 1, -1)


def ordered(listed: Any) -> Task:
    return dataclasses.replace(tasks.plain(), order=listed)


def samples(listed: Any, **settings: Any) -> list[list[int]]:
    """Of each batch that this rank is given."""
    found = []
    config = RunConfig(device="cpu", batch_size=3, epochs=2, **settings)
    with Engine(ordered(listed), config) as engine:
        assert engine.total_steps == 6
        for batch in engine.batches():
            engine.step(batch)
            micro = batch.micro_batches[0]
            found.append(micro.samples.tolist()[: micro.size])
    return found


def test_an_epoch_has_what_is_listed_in_its_order() -> None:
    assert (
        samples(backwards) == samples(Backwards()) == [[6, 5, 4], [3, 2, 1], [0], [7, 6, 5], [4, 3, 2], [1]]
    )


def test_ranks_divide_what_is_listed(ranks: Any) -> None:
    first, second = ranks(2).run(samples, backwards, balance="2,1")
    both = [a + b for a, b in zip(first, second, strict=True)]
    assert both == samples(backwards)
    assert [len(own) for own in first] == [2, 2, 1, 2, 2, 1]


def by_rank(epoch: int) -> list[int]:
    return [dist.get_rank(), 2]


def refused_on_a_rank() -> str:
    with pytest.raises(ConfigurationError) as refused:
        Engine(ordered(by_rank), RunConfig(device="cpu"))
    return str(refused.value)


def test_ranks_that_list_other_samples_are_told(ranks: Any) -> None:
    assert set(ranks(2).run(refused_on_a_rank)) == {
        "Task.order lists other samples on one rank than on another: let it depend on the epoch alone, and seed what "
        "it draws"
    }


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (lambda epoch: [], "shape \\(0,\\)"),
        (lambda epoch: [0.5, 1.0], "type float64"),
        (lambda epoch: [[1, 2]], "shape \\(1, 2\\)"),
        (lambda epoch: [0, 99], "lists sample 99 in epoch 0"),
        (lambda epoch: [0, -1], "lists sample -1 in epoch 0"),
        (lambda epoch: [0] * (3 + epoch), "lists 4 samples for epoch 1, and 3 for the first"),
    ],
)
def test_what_is_no_order_is_refused(listed: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        samples(listed) if "epoch 1" not in words else list(ListedOrder.of_task(listed, 10).ids(1, 0, 1))


def test_positions_are_the_inverse_of_samples() -> None:
    order = ListedOrder.of_task(backwards, 30)
    ids = order.ids(3, 0, order.size)
    assert np.array_equal(order.position(3, ids), np.arange(7))
    assert np.array_equal(order.ids_at(3, [[2], [0]]), [[7], [9]])


def test_a_run_that_goes_on_with_another_order_is_told(tmp_path: Path) -> None:
    config = RunConfig(device="cpu", batch_size=3)
    with Engine(ordered(backwards), config) as engine:
        engine.save(tmp_path)
    for other in (None, lambda epoch: range(7)):
        with (
            Engine(ordered(other), config) as engine,
            pytest.raises(ConfigurationError, match=r"order|samples"),
        ):
            engine.load(tmp_path)
    with Engine(ordered(backwards), config) as engine:
        engine.load(tmp_path)


def sharded(together: int = 2, window: int = 0, lengths: tuple[int, ...] = (9, 9, 12)) -> Task:
    rows = tasks.plain().train

    def opened(shard: int) -> Any:
        begin = sum(lengths[:shard])
        return (rows[index] for index in range(begin, begin + lengths[shard]))

    data = ShardedDataset(range(3), opened, lengths=lengths, together=together, window=window)
    return dataclasses.replace(tasks.plain(), train=data)


def test_shards_in_another_order_are_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    config = RunConfig(device="cpu", batch_size=5, steps=6)
    with Engine(sharded(), config) as engine:
        for batch in engine.batches():
            engine.save(tmp_path / str(engine.steps_done), keep=9)
            engine.step(batch)
    for other in (sharded(together=3), sharded(window=4), sharded(lengths=(9, 12, 9))):
        with Engine(other, config) as engine:
            engine.load(tmp_path / "0")
            with pytest.raises(ConfigurationError, match="of shards with other lengths, or another together"):
                engine.load(tmp_path / "2")
    with Engine(sharded(), config) as engine:
        engine.load(tmp_path / "2")
