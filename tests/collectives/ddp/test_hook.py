from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.collectives.base import key_of
from evener.collectives.compress import TopK
from evener.collectives.ddp.hook import hook, power_sgd_hook, power_sgd_state
from evener.collectives.native import Native
from evener.collectives.registry import make
from evener.errors import RankTimeoutError


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(5 + rank, 8, generator=torch.Generator().manual_seed(rank))


def reference() -> list[torch.Tensor]:
    """Gradients of the sum over the samples of all ranks."""
    single = model()
    single(torch.cat([batch(rank) for rank in range(dist.get_world_size())])).sum().backward()
    return [parameter.grad for parameter in single.parameters()]


def ddp_sums(name: str, compression: str | None) -> float:
    """The largest difference to the reference in the third step, when the buckets are those of all later steps."""
    with make(name, timeout_seconds=20, compression=compression) as all_reduce:
        replica = DistributedDataParallel(model(), bucket_cap_mb=0.01)
        replica.register_comm_hook(all_reduce, hook)
        for _ in range(3):
            replica.zero_grad()
            replica(batch(dist.get_rank())).sum().backward()
        gradients = [parameter.grad for parameter in replica.parameters()]
        del replica
        gc.collect()
    return max(float((a - b).abs().max()) for a, b in zip(gradients, reference(), strict=True))


def ddp_of_sparse_gradients() -> torch.Tensor:
    with warnings.catch_warnings(), make("shared-memory", timeout_seconds=20) as all_reduce:
        warnings.simplefilter("ignore")
        embedding = nn.Embedding(6, 2, sparse=True)
        replica = DistributedDataParallel(embedding)
        replica.register_comm_hook(all_reduce, hook)
        replica(torch.tensor([0, 1 + dist.get_rank()])).sum().backward()
        gradient = embedding.weight.grad.to_dense()
        del replica
        gc.collect()
    return gradient


def ddp_with_power_sgd() -> float:
    replica = DistributedDataParallel(model())
    replica.register_comm_hook(power_sgd_state(start_powerSGD_iter=2, rank=64), power_sgd_hook)
    for _ in range(4):
        replica.zero_grad()
        replica(batch(dist.get_rank())).sum().backward()
    gradients = [parameter.grad for parameter in replica.parameters()]
    del replica
    gc.collect()
    return max(float((a - b).abs().max()) for a, b in zip(gradients, reference(), strict=True))


class Fails:
    """Stands in for an all-reduce of which one rank does not come."""

    def __init__(self, late: bool) -> None:
        self._late = late

    remembers = False

    def __call__(self, tensor: torch.Tensor, key: Any = None, *, lasting: bool = False) -> Any:
        from evener.collectives.base import Promised
        from evener.collectives.executor.worker import Worker

        def fail() -> torch.Tensor:
            raise RankTimeoutError("rank 1 is stopped")

        if not self._late:
            fail()
        return Promised(Worker("test").submit(fail))


def error_in_backward(late: bool) -> str:
    replica = DistributedDataParallel(model())
    replica.register_comm_hook(Fails(late), hook)
    with pytest.raises((RankTimeoutError, RuntimeError)) as raised:
        replica(batch(0)).sum().backward()
    del replica
    gc.collect()
    return str(raised.value)


class Remembers(Native):
    """Keeps the keys that it is given, with what lies in the buckets."""

    remembers = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, int]] = []

    def start_for(self, tensor: torch.Tensor, key: Any) -> Any:
        self.seen.append((key, tensor.numel()))
        return self.start(tensor)


def keys_of_three_steps() -> tuple[list[list[tuple[str, ...]]], bool]:
    """The names of the parameters in each bucket of each step; whether equal names are equal keys."""
    module = model()
    names = {parameter: name for name, parameter in module.named_parameters()}
    all_reduce = Remembers()
    replica = DistributedDataParallel(module, bucket_cap_mb=0.01)
    replica.register_comm_hook(all_reduce, hook)
    steps = []
    for _ in range(3):
        all_reduce.seen.clear()
        replica(batch(0)).sum().backward()
        steps.append(list(all_reduce.seen))
    del replica
    gc.collect()
    assert all(sum(part().numel() for part in key) == numel for step in steps for key, numel in step)
    named = [[tuple(names[part()] for part in key) for key, _ in step] for step in steps]
    return named, steps[1] == steps[2] and steps[0] != steps[1]


def test_a_bucket_s_key_is_its_parameters(ranks: Any) -> None:
    """The first step's bucket is cut anew after it, and what is bucket 0 then holds other parameters."""
    for (first, second, third), alike in ranks(2).run(keys_of_three_steps):
        assert len(first) == 1
        assert second == third == [("3.bias", "3.weight", "2.bias", "2.weight"), ("0.bias", "0.weight")]
        assert alike


def what_is_left_of_buckets() -> list[tuple[int, float]]:
    """After each step how many buckets are remembered, and what is left of the last of them to be reduced."""
    seen = []
    module = model()
    with TopK(make("shared-memory", timeout_seconds=20), ratio=0.01) as all_reduce:
        replica = DistributedDataParallel(module, bucket_cap_mb=0.01)
        replica.register_comm_hook(all_reduce, hook)
        for _ in range(4):
            replica.zero_grad()
            replica(torch.ones(1, 8)).sum().backward()
            first = key_of([module[0].bias, module[0].weight])
            left = all_reduce.feedback.residual(torch.zeros(64 + 512), first) if len(seen) else torch.zeros(1)
            seen.append((len(all_reduce.feedback), float(left.abs().sum())))
        del replica
        gc.collect()
    return seen


def test_buckets_that_are_cut_anew_start_with_nothing_left(ranks: Any) -> None:
    """The one of the first step is forgotten; what is left of those that follow grows, as little is sent."""
    for seen in ranks(2).run(what_is_left_of_buckets):
        assert [buckets for buckets, _ in seen] == [1, 2, 2, 2]
        after_second, after_third, after_fourth = [left for _, left in seen[1:]]
        assert 0 < after_second < after_third < after_fourth
        assert after_third == pytest.approx(2 * after_second, rel=0.1)


@pytest.mark.parametrize("name", ["native", "ring", "shared-memory"])
def test_gradients_are_those_of_all_samples(ranks: Any, name: str) -> None:
    assert max(ranks(2).run(ddp_sums, name, None)) < 1e-5


@pytest.mark.parametrize(("compression", "within"), [("bf16", 0.5), ("int8", 2.0)])
def test_compressed_gradients_are_about_those(ranks: Any, compression: str, within: float) -> None:
    assert max(ranks(2).run(ddp_sums, "shared-memory", compression)) < within


def test_sparse_gradients(ranks: Any) -> None:
    for gradient in ranks(2).run(ddp_of_sparse_gradients):
        assert gradient[:, 0].tolist() == [2, 1, 1, 0, 0, 0]


def test_power_sgd_sums(ranks: Any) -> None:
    """Of full rank it loses nothing but rounding."""
    assert max(ranks(2).run(ddp_with_power_sgd)) < 1e-2


@pytest.mark.parametrize("late", [False, True])
def test_an_error_comes_out_of_backward(ranks: Any, late: bool) -> None:
    for message in ranks(2).run(error_in_backward, late):
        assert "rank 1 is stopped" in message
