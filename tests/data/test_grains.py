from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evener.balance.base import Fixed
from evener.core.config.exact_bits import ExactBits
from evener.data import grains
from evener.data.batch import Batch
from evener.data.batch_plan import Shares
from evener.data.costs import CostDivision, Costs
from evener.data.grains import GrainPlanner, grain_positions, in_whole_blocks, padded
from evener.data.loader import Loader
from evener.data.sampler import Order
from evener.errors import ConfigurationError, ShareError

SIZE = 47
FOURS = ExactBits(4, 2)


class Drawn(Dataset[Any]):
    """Samples with random numbers of all three generators, as augmentation draws them."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(
            [index, torch.rand(()), np.random.rand(), random.random()], dtype=torch.float64
        ), index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ((torch.tensor([float(index)]), index) for index in range(SIZE))


def noisy(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Collates with random numbers, as masking of words does."""
    inputs = torch.stack([item for item, _ in items])
    return inputs + torch.rand_like(inputs), torch.tensor([target for _, target in items])


def batches(dataset: Any, weights: list[float], bits: ExactBits = FOURS, **options: Any) -> list[list[Batch]]:
    """For each rank its batches."""
    world_size = len(weights)
    shares = options.pop("shares", None) or Fixed(weights, share_multiple_of=bits.block).shares
    found = []
    for rank in range(world_size):
        given: dict[str, Any] = {
            "batch_size": 20,
            "seed": 3,
            "epochs": 2,
            "agree": lambda n: [n] * world_size,
        }
        order = None if isinstance(dataset, IterableDataset) else Order(SIZE, seed=5)
        with Loader(
            dataset, order, rank=rank, world_size=world_size, shares=shares, bits=bits, **(given | options)
        ) as loader:
            found.append(list(loader))
    return found


def grains_of(of_ranks: list[list[Batch]]) -> dict[tuple[int, int | None], tuple[Tensor, Tensor, Tensor]]:
    """The tensors of each grain, by epoch and position; each grain has one rank."""
    found: dict[tuple[int, int | None], tuple[Tensor, Tensor, Tensor]] = {}
    for batch in (batch for of_rank in of_ranks for batch in of_rank):
        for micro in batch.micro_batches:
            if micro.weight:
                assert (batch.epoch, micro.position) not in found
                found[batch.epoch, micro.position] = micro.inputs, micro.targets, micro.samples
    return found


@given(
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
)
@settings(max_examples=300, deadline=None)
def test_blocks_are_whole_and_every_position_is_in_one(
    size: int, grain: int, grains_per_block: int, weights: list[int]
) -> None:
    bits, world_size = ExactBits(grain, grains_per_block), len(weights)
    shares: Shares = Fixed([float(weight) for weight in weights]).shares  # knows nothing of blocks
    ids, seen = np.arange(size), []
    for rank in range(world_size):
        cut = GrainPlanner(size, shares, rank, world_size, bits=bits)
        divided, reads, _ = cut.divided(0, ids, 0)
        assert sum(divided) == size
        own = [list(part) for part, weight in reads if weight]
        assert (not own) == (divided[rank] == 0)
        assert all(part[0] % grain == 0 for part in own)
        assert not own or own[0][0] % bits.block == 0, "a block has one rank"
        assert own or [weight for _, weight in reads] == [0], "a placeholder"
        seen += own
    assert [position for part in seen for position in part] == list(range(size))
    assert all(len(part) == grain for part in seen[:-1])


def test_the_drawing_of_the_module_docstring() -> None:
    bits = ExactBits(4)
    assert in_whole_blocks(bits, 14, [8, 8]) == (8, 6)
    assert padded(bits, 14) == 16
    assert grain_positions(bits, 100, (8, 6), 1, 2) == [108, 112]
    assert grain_positions(bits, 100, (14, 0), 1, 1) == [None]


def test_blocks_go_to_the_largest_remainders() -> None:
    assert in_whole_blocks(ExactBits(4), 16, [9, 7]) == (8, 8)
    assert in_whole_blocks(ExactBits(4), 16, [11, 5]) == (12, 4)
    with pytest.raises(ShareError, match="add up to 15, not to the 16"):
        in_whole_blocks(ExactBits(4), 14, [10, 5])


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0, 0.0], [1.0, 2.0, 2.0, 1.0, 3.0]])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_grain_is_the_same_on_whichever_rank(weights: list[float], workers: int) -> None:
    alone = grains_of(batches(Drawn(), [1.0], collate=noisy))
    there = grains_of(
        batches(Drawn(), weights, collate=noisy, workers=workers if weights[2:] == [0.0] else 0)
    )
    assert alone.keys() == there.keys()
    for place, tensors in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, there[place], strict=True)), place


def test_reading_leaves_the_generators_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    batches(Drawn(), [1.0], collate=noisy)
    assert torch.equal(torch.rand(3), expected)


def test_each_epoch_draws_anew() -> None:
    found = grains_of(batches(Drawn(), [1.0]))
    numbers = [inputs[:, 1:] for (_, _), (inputs, _, _) in found.items()]
    assert len({float(number) for part in numbers for number in part.flatten()}) == 2 * SIZE * 3


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0, 0.0]])
def test_a_stream_is_cut_by_position(weights: list[float]) -> None:
    alone, there = (grains_of(batches(Stream(), given, collate=noisy)) for given in ([1.0], weights))
    assert alone.keys() == there.keys()
    for place, tensors in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, there[place], strict=True)), place


def test_blocks_end_where_the_marks_say() -> None:
    (first, second) = (of_rank[0] for of_rank in batches(Drawn(), [1.0, 2.0]))
    assert first.shares == second.shares == (8, 12)
    assert [(micro.position, micro.ends_block) for micro in first.micro_batches] == [(0, False), (4, True)]
    assert [(micro.position, micro.ends_block) for micro in second.micro_batches] == [
        (8, False),
        (12, True),
        (16, True),
    ]


def test_ranks_that_gather_in_passes_have_equally_many() -> None:
    first, second = (of_rank[0] for of_rank in batches(Drawn(), [1.0, 2.0], equally_many=True))
    assert [(micro.weight, micro.position, micro.ends_block) for micro in first.micro_batches] == [
        (0, None, False),
        (1, 0, False),
        (1, 4, True),
    ]
    assert len(second.micro_batches) == 3


def test_costs_divide_whole_blocks() -> None:
    costs = Costs([9.0] * 8 + [1.0] * 12, list(range(20)))
    equal = lambda step, size: (0.5, 0.5)  # noqa: E731
    cut = GrainPlanner(
        20,
        Fixed([1.0, 1.0]).shares,
        1,
        2,
        by_cost=CostDivision(costs, equal),
        bits=ExactBits(4),
    )
    shares, reads, of_ranks = cut.divided(0, np.arange(20), 0)
    assert shares == (4, 16)
    assert of_ranks == (36.0, 48.0)
    assert [list(ids) for ids, _ in reads] == [list(range(at, at + 4)) for at in (4, 8, 12, 16)]


def test_data_that_ranks_hold_apart_are_refused() -> None:
    class Parts(Stream):
        def shard(self, index: int, count: int) -> Any:
            return iter(self)

    with pytest.raises(ConfigurationError, match="exact=bits cuts the training set by position"):
        batches(Parts(), [1.0, 1.0])


def test_a_stream_that_differs_by_rank_is_refused() -> None:
    found = iter([[20, 20], [1, 2]])
    with pytest.raises(Exception, match="not the same on all ranks, and exact=bits cuts one"):
        batches(Stream(), [1.0, 1.0], agree=lambda n: next(found))


@pytest.mark.parametrize(
    ("dataset", "collate", "draws"),
    [
        (TensorDataset(torch.rand(SIZE, 2), torch.arange(SIZE)), None, False),
        (TensorDataset(torch.rand(SIZE, 2), torch.arange(SIZE)), noisy, True),
        (Drawn(), None, True),
    ],
)
def test_generators_are_seeded_where_reading_may_draw(
    dataset: Any, collate: Any, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To seed them takes longer than to read a few rows of a tensor."""
    seeds: list[int] = []
    monkeypatch.setattr(grains, "seed_all", seeds.append)
    state = random.getstate()
    batches(dataset, [1.0, 1.0], collate=collate)
    assert bool(seeds) == draws
    assert random.getstate() == state
