from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.collectives.ddp.hook import hook
from evener.collectives.shared_memory import shared_tensors as homes_module
from evener.collectives.shared_memory.all_reduce import SharedMemory
from evener.collectives.shared_memory.in_place import RankSlice, slice_of
from evener.collectives.shared_memory.shared_tensors import Homes
from evener.errors import ConfigurationError, RankError
from tests.tiers import ALWAYS, NIGHTLY, spread

COUNT = 400_003


def terms(dtype: torch.dtype, turn: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(turn)
    numbers = torch.randn(dist.get_world_size(), COUNT, generator=generator) * 30
    return list(numbers.to(dtype))


@contextmanager
def settlings() -> Iterator[list[int]]:
    """The lengths of the tensors that get a home in the block."""
    found: list[int] = []
    original = Homes.settle

    def settle(self: Homes, tensor: Tensor) -> Any:
        found.append(tensor.numel())
        return original(self, tensor)

    with mock.patch.object(Homes, "settle", settle):
        yield found


def same_bits_as_through_slots() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64):
        with SharedMemory(timeout_seconds=20) as all_reduce, settlings() as settled:
            place = torch.empty(COUNT + 5, dtype=dtype)[5:]  # begins within a storage
            for turn in range(4):
                own = terms(dtype, turn)[dist.get_rank()]
                place.copy_(own)
                all_reduce(own)
                all_reduce(place, lasting=True).wait()
                assert torch.equal(place, own)
            assert settled == [COUNT]
            assert place.untyped_storage().is_shared()


@pytest.mark.parametrize("world_size", spread([2, 3, 4], NIGHTLY, ALWAYS, NIGHTLY))
def test_sums_where_a_tensor_lies(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(same_bits_as_through_slots)


def views_follow() -> None:
    with SharedMemory(timeout_seconds=20) as all_reduce:
        tensor = torch.ones(COUNT)
        view = tensor[7:9]
        before = tensor.data_ptr()
        for turn in range(3):
            tensor.fill_(turn + 1)
            all_reduce(tensor, lasting=True)
            assert (tensor == 2 * (turn + 1)).all()
            assert view.tolist() == [2 * (turn + 1)] * 2
            assert (tensor.data_ptr() == before) == (turn == 0)  # what comes once is not moved
        view.zero_()
        assert tensor[7] == 0


def test_a_tensor_is_moved_when_it_comes_again_and_its_views_with_it(ranks: Any) -> None:
    ranks(2).run(views_follow)


def mapped() -> int:
    """Files of shared memory that this process sees."""
    return sum("/dev/shm/" in line or "torch_" in line for line in Path("/proc/self/maps").open())


def maps_of_tensors_that_are_gone() -> list[int]:
    counts = []
    with SharedMemory(timeout_seconds=20) as all_reduce:
        for _ in range(4):
            tensor = torch.ones(COUNT)
            for _ in range(2):
                all_reduce(tensor, lasting=True)
            counts.append(mapped())
            del tensor
    del all_reduce
    counts.append(mapped())
    return counts


def test_memory_of_a_tensor_that_is_gone_is_given_back(ranks: Any) -> None:
    for counts in ranks(2).run(maps_of_tensors_that_are_gone):
        assert max(counts) - min(counts) <= 3  # of a tensor: the own, and a map of each rank's


def without_room_on_rank_1() -> list[str]:
    tensor = torch.ones(COUNT)
    little = mock.patch.object(
        homes_module.os, "statvfs", return_value=SimpleNamespace(f_bavail=1, f_frsize=2**20)
    )
    with (
        SharedMemory(timeout_seconds=20) as all_reduce,
        warnings.catch_warnings(record=True) as told,
        settlings() as settled,
    ):
        warnings.simplefilter("always")
        for _ in range(4):
            tensor.fill_(1)
            if dist.get_rank() == 1:
                with little:
                    all_reduce(tensor, lasting=True)
            else:
                all_reduce(tensor, lasting=True)
            assert (tensor == 2).all()
    assert settled == [COUNT]
    assert not tensor.untyped_storage().is_shared()
    return [str(warning.message) for warning in told]


def test_where_one_rank_has_no_room_all_copy_and_rank_0_says_so(ranks: Any) -> None:
    first, second = ranks(2).run(without_room_on_rank_1)
    assert len(first) == 1
    assert "/dev/shm has 1 MiB left for buckets of 3 MiB" in first[0]
    assert not second


def one_rank_takes_another_tensor_each_time() -> None:
    rank, kept = dist.get_rank(), torch.ones(COUNT)
    with SharedMemory(timeout_seconds=20) as all_reduce:
        for _ in range(5):
            tensor = kept if rank == 0 else torch.empty(COUNT)
            tensor.fill_(rank + 1)
            all_reduce(tensor, lasting=True)
            assert (tensor == 3).all()


def test_ranks_whose_tensors_do_not_last_alike_copy(ranks: Any) -> None:
    ranks(2).run(one_rank_takes_another_tensor_each_time)


def errors_of_different_tensors() -> list[str]:
    rank, found = dist.get_rank(), []
    for tensor, lasting in ((torch.ones(COUNT + rank), True), (torch.ones(COUNT), rank == 0)):
        with SharedMemory(timeout_seconds=20) as all_reduce:
            with pytest.raises(ConfigurationError) as raised:
                all_reduce(tensor, lasting=lasting)
            found.append(str(raised.value))
            with pytest.raises(RankError, match="earlier"):
                all_reduce(tensor, lasting=lasting)
            dist.barrier()
    return found


def test_different_tensors_are_named(ranks: Any) -> None:
    for lengths, kinds in ranks(2).run(errors_of_different_tensors):
        assert f"rank 0 {COUNT} x float32 in lasting memory, rank 1 {COUNT + 1} x" in lengths
        assert f"rank 0 {COUNT} x float32 in lasting memory, rank 1 {COUNT} x float32" in kinds


def gradients_of_ddp(lasting: bool) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    with SharedMemory(timeout_seconds=20) as all_reduce, settlings() as settled:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.8, gradient_as_bucket_view=True)
        if not lasting:
            mock.patch.object(all_reduce, "start_lasting", all_reduce.start_for).start()
        wrapped.register_comm_hook(all_reduce, hook)
        optimizer, found = torch.optim.SGD(model.parameters(), 1e-3), []
        for step in range(6):
            torch.manual_seed(10 * step + dist.get_rank())
            wrapped(torch.randn(5, 300)).square().mean().backward()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    del wrapped
    return found, len(settled)


def test_buckets_of_ddp_are_moved_once(ranks: Any) -> None:
    copied, moved = ranks(2).run(gradients_of_ddp, False), ranks(2).run(gradients_of_ddp, True)
    for (expected, nothing), (found, homes) in zip(copied, moved, strict=True):
        assert nothing == 0
        assert 2 <= homes <= 6
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def memory_of_others_after_an_error() -> int:
    tensor = torch.ones(COUNT)
    before = mapped()
    with SharedMemory(timeout_seconds=20) as all_reduce:
        for _ in range(2):
            all_reduce(tensor, lasting=True)
        with pytest.raises(ConfigurationError):
            all_reduce(torch.ones(COUNT + dist.get_rank()))
        return mapped() - before


def test_after_an_error_no_rank_sees_the_memory_of_others(ranks: Any) -> None:
    assert ranks(2).run(memory_of_others_after_an_error) == [1, 1]


@pytest.mark.parametrize("count", [1, 17, 1000, 70_000])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_slices_add_up(count: int, world_size: int) -> None:
    flats = [torch.full((count,), float(rank + 1)) for rank in range(world_size)]
    ends = [slice_of(count, torch.float32, world_size, rank) for rank in range(world_size)]
    assert [start for start, _ in ends[1:]] == [stop for _, stop in ends[:-1]]
    for rank in range(world_size):
        RankSlice(flats, rank).sum()
    for flat in flats:
        assert (flat == sum(range(1, world_size + 1))).all()


def test_the_directory_is_the_one_that_torch_uses() -> None:
    tensor = torch.ones(5000)
    descriptor, nbytes = homes_module.shared_file(tensor.untyped_storage())
    assert nbytes >= tensor.nbytes
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(homes_module.DIRECTORY)
