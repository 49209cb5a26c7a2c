from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.collectives.hook import hook, power_sgd_hook, power_sgd_state
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

    def __call__(self, tensor: torch.Tensor) -> Any:
        from evener.collectives.base import Promised
        from evener.collectives.worker import Worker

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
