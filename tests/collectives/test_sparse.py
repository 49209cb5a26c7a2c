"""Sparse tensors are summed over ranks by gathering, where a backend has no sum for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce
from evener.collectives.native import Native
from evener.collectives.sparse import is_native, sum_gathered

ROWS = {0: [4, 1, 4], 1: [], 2: [0, 1]}
"""Of each rank; rank 0 has one twice, and rank 1 none."""


def own(rank: int, *dense: int) -> Tensor:
    rows = torch.tensor([ROWS[rank]], dtype=torch.int64)
    values = torch.rand(len(ROWS[rank]), *dense, generator=torch.Generator().manual_seed(rank)).double()
    return torch.sparse_coo_tensor(rows, values, (6, *dense), check_invariants=True)


def gathered(*dense: int) -> tuple[bool, Tensor, Tensor]:
    tensor = own(dist.get_rank(), *dense)
    found = sum_gathered(tensor, None)
    return found is tensor, tensor.coalesce().indices(), tensor.to_dense()


@pytest.mark.parametrize("dense", [(), (3,), (2, 0), (2, 2)])
def test_rows_are_summed_and_all_ranks_get_the_same_bits(ranks: Any, dense: tuple[int, ...]) -> None:
    expected = sum(own(rank, *dense).to_dense() for rank in range(3))
    answers = ranks(3).run(gathered, *dense)
    for in_place, indices, total in answers:
        assert in_place
        assert indices.tolist() == [[0, 1, 4]]
        torch.testing.assert_close(total, expected, rtol=1e-15, atol=0)
        assert torch.equal(total, answers[0][2])


def nothing_anywhere() -> int:
    empty = torch.sparse_coo_tensor(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(0, 3), (6, 3))
    return sum_gathered(empty, None).coalesce().indices().shape[1]


def test_ranks_without_rows_sum_nothing(ranks: Any) -> None:
    assert ranks(2).run(nothing_anywhere) == [0, 0]


def by_an_all_reduce() -> tuple[Tensor, Tensor]:
    """As on a device whose backend sums no sparse tensors."""
    with pytest.MonkeyPatch.context() as patched, Native() as all_reduce:
        patched.setattr("evener.collectives.base.is_native", lambda tensor: False)
        waited, promised = own(dist.get_rank(), 2), own(dist.get_rank(), 2)
        all_reduce(waited).wait()
        return waited.to_dense(), all_reduce(promised).future().wait().to_dense()


def test_an_all_reduce_gathers_where_the_backend_cannot(ranks: Any) -> None:
    expected = sum(own(rank, 2).to_dense() for rank in range(2))
    for waited, promised in ranks(2).run(by_an_all_reduce):
        torch.testing.assert_close(waited, expected, rtol=1e-15, atol=0)
        assert torch.equal(waited, promised)


def test_a_rank_that_is_lost_is_told_of() -> None:
    class Lost(AllReduce):
        name = "lost"

        def __init__(self) -> None:
            self.group, self.roll_call = object(), self  # type: ignore[assignment]

        def explain(self, error: Exception) -> Exception:
            return ValueError(f"explained: {error}")

        def start(self, tensor: Tensor) -> Any:
            raise AssertionError

    def raises(*_: object) -> None:
        raise RuntimeError("connection closed")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("evener.collectives.base.is_native", lambda tensor: False)
        patched.setattr("evener.collectives.base.sum_gathered", raises)
        with pytest.raises(ValueError, match="explained: connection closed"):
            Lost()(own(0))


def test_a_cpu_has_a_sum_of_its_own_and_other_devices_only_of_dense_tensors() -> None:
    assert is_native(own(0))
    assert is_native(torch.zeros(2, device="meta"))
    assert not is_native(torch.empty(2, 2, layout=torch.sparse_coo, device="meta"))
