from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.data.shard_order import ShardOrder
from evener.errors import ConfigurationError

lengths = st.lists(st.integers(0, 13), min_size=1, max_size=9).filter(any).map(tuple)
orders = st.builds(
    ShardOrder.of_lengths,
    lengths,
    seed=st.integers(0, 99),
    together=st.integers(1, 4),
    window=st.integers(0, 5),
)


def shards_of(order: ShardOrder, ids: list[int]) -> list[int]:
    ends = np.cumsum(order.lengths)
    return np.searchsorted(ends, ids, side="right").tolist()  # type: ignore[no-any-return]


def test_the_drawing() -> None:
    order = ShardOrder(9, shuffle=False, lengths=(6, 3), together=2)
    assert [order.ids(0, at, at + 3).tolist() for at in (0, 3, 6)] == [[0, 1, 6], [2, 3, 7], [4, 5, 8]]


@given(orders, st.integers(0, 3), st.integers(1, 20))
def test_every_epoch_has_each_sample_once_in_batches_of_any_size(
    order: ShardOrder, epoch: int, batch_size: int
) -> None:
    seen = [order.ids(epoch, start, stop).tolist() for start, stop in order.batches(batch_size)]
    assert sorted(chain.from_iterable(seen)) == list(range(order.size))
    assert all(
        shards_of(order, ids) == sorted(shards_of(order, ids), key=shards_of(order, ids).index)
        for ids in seen
    )


@given(orders, st.data())
def test_the_samples_of_a_range_do_not_depend_on_how_it_is_cut(
    order: ShardOrder, data: st.DataObject
) -> None:
    start, middle, stop = sorted(data.draw(st.integers(0, order.size)) for _ in range(3))
    whole = order.ids(1, start, stop).tolist()
    parts = [*order.ids(1, start, middle).tolist(), *order.ids(1, middle, stop).tolist()]
    assert sorted(whole) == sorted(parts)


@given(orders)
def test_positions_are_the_inverse_of_ids(order: ShardOrder) -> None:
    everything = np.arange(order.size)
    assert order.ids_at(0, order.position(0, everything)).tolist() == everything.tolist()


@given(orders)
def test_a_shard_is_read_from_its_beginning_to_its_end_within_windows(order: ShardOrder) -> None:
    ids = np.concatenate([order.ids(0, at, at + 1) for at in range(order.size)])
    width = max(1, order.window)
    for first, length in zip(order.offsets, order.lengths, strict=True):
        numbers = ids[(ids >= first) & (ids < first + length)] - first
        assert (np.diff(numbers // width) >= 0).all()


@given(orders)
def test_no_more_shards_than_together_are_open_at_once(order: ShardOrder) -> None:
    read = shards_of(order, [int(order.ids(0, at, at + 1)[0]) for at in range(order.size)])
    for at in range(order.size):
        begun, unfinished = set(read[: at + 1]), set(read[at:])
        assert len(begun & unfinished) <= order.together


def test_epochs_and_seeds_shuffle_shards_and_windows() -> None:
    order = ShardOrder.of_lengths((50,) * 20, 0, 4, 10)
    first, second = order.ids(0, 0, 200).tolist(), order.ids(1, 0, 200).tolist()
    assert first != second
    assert set(shards_of(order, first)) != set(shards_of(order, second))
    assert first != ShardOrder.of_lengths((50,) * 20, 1, 4, 10).ids(0, 0, 200).tolist()
    plain = ShardOrder.of_lengths((50,) * 20, 0, 4, 0).ids(0, 0, 200).tolist()
    assert plain != first
    assert sorted(plain) == sorted(first)


@pytest.mark.parametrize("options", [{"together": 0}, {"window": -1}, {"together": 2.0}, {"window": "3"}])
def test_options_that_give_no_order_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="give no order of shards"):
        ShardOrder(3, lengths=(3,), **options)


def test_positions_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="not within"):
        ShardOrder.of_lengths((3, 2), 0, 2, 0).ids(0, 4, 6)
