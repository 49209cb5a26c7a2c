from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.collectives.compress import Half
from evener.collectives.ddp.buckets import DEFAULT_BUCKET_NBYTES, bucket_nbytes
from evener.collectives.native import Native
from evener.collectives.tuning.auto import Fastest
from evener.collectives.tuning.select import bucket_size
from tests.collectives.tuning.test_auto import COSTS, both

MIB = 2**20


def test_where_nothing_was_measured_buckets_are_those_of_pytorch() -> None:
    assert bucket_nbytes(lambda nbytes: None, 100 * MIB) == DEFAULT_BUCKET_NBYTES


def test_a_model_without_gradients_has_a_bucket_size_too() -> None:
    assert bucket_nbytes(lambda nbytes: 1.0, 0) == DEFAULT_BUCKET_NBYTES


@pytest.mark.parametrize("alpha", [1e-5, 1e-3, 1e-1])
def test_backward_is_assumed_to_take_as_long_as_one_all_reduce_of_all(alpha: float) -> None:
    def seconds_of(nbytes: int) -> float:
        return alpha + 1e-9 * nbytes

    expected = bucket_size(100 * MIB, seconds_of(100 * MIB), seconds_of)
    assert bucket_nbytes(seconds_of, 100 * MIB) == expected


def test_the_slower_a_message_starts_the_larger_are_the_buckets() -> None:
    sizes = [bucket_nbytes(lambda n, a=a: a + 1e-9 * n, 100 * MIB) for a in (1e-5, 1e-3, 1e-1)]  # type: ignore[misc]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_a_known_backward_counts() -> None:
    def seconds_of(nbytes: int) -> float:
        return 1e-3 + 1e-9 * nbytes

    assert bucket_nbytes(seconds_of, 100 * MIB, 1e-6) == 100 * MIB
    assert bucket_nbytes(seconds_of, 100 * MIB, 10.0) < MIB


def expectations() -> tuple[float | None, float | None, float | None]:
    with Fastest(both(), COSTS) as auto:
        half = Half(auto, torch.float16).expected_seconds(2000)
        return Native().expected_seconds(1000), auto.expected_seconds(1000), half


def test_what_was_measured_is_expected(ranks: Any) -> None:
    """Half of the bytes of a tensor travel where it is sent as float16."""
    assert ranks(2).run(expectations) == [(None, 1e-5, 1e-5)] * 2
