from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.data.sampler import Order
from evener.errors import ConfigurationError

GOLDEN = [7, 3, 5, 6, 9, 4, 2, 0, 1, 8]

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**40)
epochs = st.integers(0, 10**6)


@given(sizes, seeds, epochs)
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_each_sample_once(size: int, seed: int, epoch: int) -> None:
    ids = Order(size, seed=seed).ids(epoch, 0, size)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(size))


def test_every_small_size_is_a_bijection() -> None:
    for size in range(1, 130):
        assert np.array_equal(np.sort(Order(size, seed=3).ids(1, 0, size)), np.arange(size))


@given(sizes, seeds, epochs)
@settings(max_examples=30, deadline=None)
def test_position_is_the_inverse(size: int, seed: int, epoch: int) -> None:
    order = Order(size, seed=seed)
    positions = np.arange(size)
    assert np.array_equal(order.position(epoch, order.ids_at(epoch, positions)), positions)


@given(st.integers(1, 50_000), st.data())
@settings(max_examples=30, deadline=None)
def test_a_slice_is_what_the_whole_holds_there(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    order = Order(size, seed=5)
    assert np.array_equal(order.ids(2, start, stop), order.ids_at(2, np.arange(size))[start:stop])


def test_a_billion_samples_without_a_list_of_them() -> None:
    order = Order(10**9, seed=7)
    positions = np.unique(np.random.default_rng(0).integers(0, 10**9, 50_000))
    ids = order.ids_at(4, positions)
    assert ids.min() >= 0
    assert ids.max() < 10**9
    assert np.unique(ids).size == positions.size
    assert np.array_equal(order.position(4, ids), positions)
    assert (
        order.ids(4, 10**9 - 3, 10**9).tolist() == order.ids_at(4, [10**9 - 3, 10**9 - 2, 10**9 - 1]).tolist()
    )


@pytest.mark.parametrize("size", [10, 1000, 10**9])
def test_ids_are_uniform_over_positions_and_seeds(size: int) -> None:
    """Chi-square over ten equal parts: 9 degrees of freedom, 33.7 is exceeded once in 10,000 times."""
    for position in (0, size // 2, size - 1):
        ids = np.array([Order(size, seed=seed).ids_at(0, [position])[0] for seed in range(600)])
        counts = np.bincount(ids * 10 // size, minlength=10)
        assert ((counts - 60) ** 2 / 60).sum() < 33.7


def test_neighbours_are_scattered() -> None:
    ids = Order(100_000, seed=1).ids(0, 0, 100_000)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(ids, np.arange(100_000))[0, 1]) < 0.02
    assert (np.diff(ids) == 1).sum() < 10


def test_small_permutations_all_occur() -> None:
    seen = {tuple(Order(3, seed=seed).ids(0, 0, 3)) for seed in range(200)}
    assert len(seen) == 6


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = Order(1000, seed=1)
    assert not np.array_equal(order.ids(0, 0, 1000), order.ids(1, 0, 1000))
    assert not np.array_equal(order.ids(0, 0, 1000), Order(1000, seed=2).ids(0, 0, 1000))
    assert np.array_equal(order.ids(0, 0, 1000), Order(1000, seed=1).ids(0, 0, 1000))


def test_the_order_never_changes_between_versions() -> None:
    assert Order(10, seed=0).ids(0, 0, 10).tolist() == GOLDEN


def test_unshuffled_is_the_order_of_the_data_set() -> None:
    order = Order(10, shuffle=False)
    assert order.ids(3, 2, 5).tolist() == [2, 3, 4]
    assert order.position(3, [4, 2]).tolist() == [4, 2]


def test_what_is_returned_is_the_callers_own() -> None:
    order = Order(100, seed=0)
    ids = order.ids(0, 0, 10)
    before = ids.copy()
    ids[:] = -1
    assert np.array_equal(order.ids(0, 0, 10), before)


def test_batches_cover_the_epoch_and_the_last_may_be_short() -> None:
    order = Order(10)
    assert list(order.batches(4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(order.batches(4, position=3)) == [(3, 7), (7, 10)]
    assert order.number_of_batches(4) == 3
    assert order.number_of_batches(4, position=3) == 2


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 11)])
def test_positions_outside_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"not within \[0, 10\)"):
        Order(10).ids(0, *bounds)


def test_values_outside_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not within \[0, 10\)"):
        Order(10).position(0, [10])


def test_no_samples_and_negative_seeds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one sample, not 0"):
        Order(0)
    with pytest.raises(ConfigurationError, match="-1"):
        Order(1, seed=-1)
