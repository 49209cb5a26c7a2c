"""Buckets that are filled by backward: what lies where, and in which order they go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evener.components.gradients import Unsound
from evener.components.sharded_tensor.shard_spec import ShardSpec
from evener.errors import ConfigurationError
from evener.strategies.sharded.buckets import MOST_ON_THE_WAY, Bucket, BucketRound, buckets_of
from evener.strategies.sharded.owned_weight import Weight

LOOK = Unsound("abc").of_flat
PIECES = {"a": (range(2), range(2, 3)), "b": (range(1), range(1, 3)), "c": (range(3), range(3, 3))}


def weight(name: str, rank: int = 0, width: int = 1) -> Weight:
    piece = ShardSpec("shard", 0, PIECES[name], rank)
    return Weight(name, nn.Parameter(torch.zeros(len(piece.local_bounds), width)), piece, sparse=False)


def give(to: Weight, *rows: float) -> None:
    to.whole.grad = torch.tensor(rows).view_as(to.whole)


class Doubling:
    """Stands for two ranks that have the same."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.waiting = self.most = 0

    def __call__(self, bucket: Bucket, flat: Tensor) -> Callable[[], Tensor]:
        self.sent.append("".join(weight.name for weight in bucket.weights))
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return lambda: self._sum(bucket, flat)

    def _sum(self, bucket: Bucket, flat: Tensor) -> Tensor:
        self.waiting -= 1
        return flat.split_with_sizes(bucket.sizes)[bucket.rank] * 2


def test_rows_of_one_owner_lie_together() -> None:
    weights = [weight("a"), weight("b")]
    bucket = Bucket(weights, degree=2, rank=0)
    assert bucket.sizes == [4, 4]
    flat = bucket.room().fill_(7)
    views = bucket.views(flat)
    for place, rows in enumerate(([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])):
        bucket.copy_in(views, place, torch.tensor(rows).view(3, 1))
    assert flat.tolist() == [1, 2, 4, 7, 3, 5, 6, 7]
    *rows, _ = bucket.own_rows(flat[:4])
    assert [row.flatten().tolist() for row in rows] == [[1, 2], [4]]


def test_buckets_go_from_the_last_weight_to_the_first() -> None:
    weights = [weight("a"), weight("b"), weight("c")]
    found = buckets_of(weights, nbytes=24, degree=2, rank=0)
    assert [[each.name for each in bucket.weights] for bucket in found] == [["c", "b"], ["a"]]


@pytest.mark.parametrize("order", ["abc", "cba", "bca", "b", ""])
def test_all_ranks_send_in_one_order_whatever_comes_first(order: str) -> None:
    weights = {name: weight(name) for name in "abc"}
    start, ends = Doubling(), list[int]()
    done = BucketRound(
        buckets_of(weights.values(), 1, 2, 0), start, lambda: ends.append(len(start.sent)), LOOK
    )
    for micro_batch in range(1, 3):
        for name in order:
            give(weights[name], 1.0, 2.0, 3.0)
            done.arrived(weights[name])
            assert weights[name].whole.grad is None, "no rank keeps more than its rows"
        done.finish()
        assert start.sent == ["c", "b", "a"] * micro_batch
    assert ends == [2, 5], "before the last one"
    assert start.most <= MOST_ON_THE_WAY + 1
    assert {each.name for each in done.given} == set(order)
    for bucket, own in ((bucket, done.sums[n]) for n, bucket in enumerate(done.buckets)):
        given = bucket.weights[0].name in order
        rows = [1.0, 2.0, 3.0][: len(PIECES[bucket.weights[0].name][0])]
        assert own[:-1].tolist() == [4 * given * row for row in rows]


def test_a_number_that_is_none_is_told_to_every_owner() -> None:
    only = weight("a")
    seen: list[Tensor] = []
    done = BucketRound(
        [Bucket([only], 2, 0)], lambda bucket, flat: lambda: seen.append(flat) or flat[:3], lambda: None, LOOK
    )
    for total, rows in ((None, (1.0, 2.0, torch.nan)), (torch.tensor(torch.inf), (1.0, 2.0, 3.0))):
        done.forget()
        done.total = total
        give(only, *rows)
        done.finish()
    assert all(bool(flat[place].isnan()) for flat in seen for place in (2, 4))
    assert len(seen) == 2


def test_a_gradient_that_comes_twice_is_refused() -> None:
    twice, other = weight("a"), weight("b")
    done = BucketRound(buckets_of([other, twice], 1000, 2, 0), Doubling(), lambda: None, LOOK)
    give(twice, 1.0, 2.0, 3.0)
    done.arrived(twice)
    with pytest.raises(ConfigurationError, match="gradient of a came twice"):
        done.arrived(twice)
