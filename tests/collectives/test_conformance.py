"""One battery for every all-reduce: what a new entry of the registry has to pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives import two_level as two_level_module
from evener.collectives.background import Background
from evener.collectives.base import AllReduce
from evener.collectives.registry import ALL_REDUCES, make
from evener.collectives.two_level import two_level

NAMES = [*(name for name in ALL_REDUCES if name != "auto"), "in the background"]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
NATIVE_DTYPES = [torch.int64, torch.bfloat16, torch.float32]
SIZES = [0, 1, 7, 33_333]
SEVERAL_SLOTS = 1_500_007


@contextmanager
def opened(name: str) -> Iterator[AllReduce]:
    if name == "two-level" and dist.get_world_size() > 2:
        # hosts of unequal size, as no test machine has them
        hosts = ((0,), tuple(range(1, dist.get_world_size())))
        made = two_level(ALL_REDUCES["ring"], None, 20, hosts)
    elif name == "in the background":
        made = Background(make("shared-memory", timeout_seconds=20))
    else:
        made = make(name, timeout_seconds=20)
    with made as all_reduce:
        yield all_reduce


def inputs(dtype: torch.dtype, numel: int, rank: int, seed: int = 0) -> Tensor:
    """Small integers, whose sum over a few ranks every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 9, (numel,), generator=generator).to(dtype)


def total(dtype: torch.dtype, numel: int, seed: int = 0) -> Tensor:
    terms = [inputs(dtype, numel, rank, seed) for rank in range(dist.get_world_size())]
    result = terms[0].clone()
    for term in terms[1:]:
        result += term
    return result


def sums_everything(name: str) -> None:
    with opened(name) as all_reduce:
        for dtype in NATIVE_DTYPES if name == "native" else DTYPES:
            for numel in SIZES:
                tensor = inputs(dtype, numel, dist.get_rank())
                all_reduce(tensor).wait()
                assert torch.equal(tensor, total(dtype, numel)), (dtype, numel)
        tensor = inputs(torch.float32, SEVERAL_SLOTS, dist.get_rank())
        all_reduce(tensor).wait()
        assert torch.equal(tensor, total(torch.float32, SEVERAL_SLOTS))


def same_bits(name: str) -> list[bytes]:
    """Sums that depend on the order of addition, of the last bits of random numbers."""
    results = []
    with opened(name) as all_reduce:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for numel in (5, 70_001, 600_000):
                torch.manual_seed(dist.get_rank())
                tensor = (torch.randn(numel) * 10 ** torch.randint(-3, 3, (numel,))).to(dtype)
                all_reduce(tensor).wait()
                results.append(tensor.view(torch.uint8).numpy().tobytes())
    return results


def many_in_flight(name: str) -> None:
    sizes = [3, 100_000, 1, 0, 40_000, 300_000, 8]
    with opened(name) as all_reduce:
        for turn in range(3):
            tensors = [inputs(torch.float32, size, dist.get_rank(), turn) for size in sizes]
            works = [all_reduce(tensor) for tensor in tensors]
            futures = [work.future() for work in works[::2]]
            for work in works:
                work.wait()
            for size, tensor in zip(sizes, tensors, strict=True):
                assert torch.equal(tensor, total(torch.float32, size, turn))
            for future, tensor in zip(futures, tensors[::2], strict=True):
                assert torch.equal(future.wait(), tensor)


def odd_tensors(name: str) -> None:
    p = dist.get_world_size()
    with opened(name) as all_reduce:
        matrix = torch.ones(6, 5).t()
        all_reduce(matrix).wait()
        assert torch.equal(matrix, torch.full((5, 6), float(p)))

        every_other = torch.ones(10)
        all_reduce(every_other[::2]).future().wait()
        assert every_other.tolist() == [p, 1] * 5

        parameter = torch.ones(3, requires_grad=True)
        all_reduce(parameter).wait()
        assert parameter.tolist() == [p] * 3

        scalar = torch.tensor(2.0)
        all_reduce(scalar).wait()
        assert scalar.item() == 2 * p

        sparse = torch.sparse_coo_tensor([[dist.get_rank()]], [1.0], (p,)).coalesce()
        all_reduce(sparse).wait()
        assert sparse.to_dense().tolist() == [1.0] * p


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_sums(ranks: Any, name: str, world_size: int) -> None:
    ranks(world_size).run(sums_everything, name)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_hold_the_same_bits(ranks: Any, name: str, world_size: int) -> None:
    results = ranks(world_size).run(same_bits, name)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_flight_keep_their_order(ranks: Any, name: str) -> None:
    ranks(3).run(many_in_flight, name)


@pytest.mark.parametrize("name", NAMES)
def test_odd_tensors(ranks: Any, name: str) -> None:
    ranks(2).run(odd_tensors, name)


def several_parts() -> None:
    part = two_level_module._PART_NBYTES
    two_level_module._PART_NBYTES = 4096
    try:
        with opened("two-level") as all_reduce:
            tensor = inputs(torch.float32, 10_001, dist.get_rank())
            all_reduce(tensor).wait()
            assert torch.equal(tensor, total(torch.float32, 10_001))
    finally:
        two_level_module._PART_NBYTES = part


def test_two_level_takes_a_buffer_in_parts(ranks: Any) -> None:
    ranks(3).run(several_parts)
