from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.tools.report.columns import Bins, KeptRows, spread_over, widened

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=100)


@given(VALUES, st.sampled_from([2, 4, 16]))
def test_bins_have_the_extremes_and_the_mean_of_their_rows(values: list[float], most: int) -> None:
    bins = Bins(2, most, 0)
    for place, value in enumerate(values):
        bins.add(np.array([[value, place]]))
    assert bins.rows == len(values)
    bins.close()
    assert bins.rows == len(values)
    spread = bins.spread(0)
    assert len(bins) <= most
    for at in range(len(bins)):
        part = np.array(values[at * bins.width : (at + 1) * bins.width])
        known = part[~np.isnan(part)]
        expected = (known.min(), known.mean(), known.max()) if len(known) else (math.nan,) * 3
        found = spread.minimum[at], spread.mean[at], spread.maximum[at]
        assert found == pytest.approx(expected, nan_ok=True)
        if len(known):
            assert bins.slow[at, 0] == known.max()
            assert values[int(bins.slow[at, 1])] == known.max()


def test_bins_stay_few_and_are_more_than_half_full() -> None:
    bins = Bins(1, 16, 0)
    for value in range(100_000):
        bins.add(np.array([[float(value)]]))
    bins.close()
    assert 8 <= len(bins) <= 16
    starts = bins.spread(0).minimum.tolist()
    assert {int(b - a) for a, b in pairwise(starts)} == {bins.width}


def test_rows_are_kept_at_one_distance() -> None:
    kept = KeptRows()
    for position in range(100_000):
        if position % kept.every == 0:
            kept.plan(position, 10 * position, 2)
    assert len(kept.steps) <= 4096
    assert kept.steps == list(range(0, 100_000, kept.every))
    assert kept.places == [10 * step for step in kept.steps]


def test_rows_of_fewer_ranks_are_filled() -> None:
    kept = KeptRows()
    kept.rows = [np.ones((1, 1)), np.ones((1, 3))]
    assert np.isnan(kept.table()[0, 0]).tolist() == [False, True, True]


def test_extremes_do_not_count_in_the_mean() -> None:
    spread = spread_over(np.array([0, 0, 1]), np.array([[1.0], [3.0], [5.0]]), 3)
    spread = widened(spread, np.array([0]), np.array([[9.0]]))
    assert spread.minimum[:, 0].tolist() == pytest.approx([1.0, 5.0, math.nan], nan_ok=True)
    assert spread.mean[:, 0].tolist() == pytest.approx([2.0, 5.0, math.nan], nan_ok=True)
    assert spread.maximum[:, 0].tolist() == pytest.approx([9.0, 5.0, math.nan], nan_ok=True)
