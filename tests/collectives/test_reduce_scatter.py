"""Sums that go to the owners of ranges, and ranges that come from them, of unequal lengths."""

from __future__ import annotations

from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.reduce_scatter import NativeOwners, RangeOwners
from evener.collectives.registry import make_owners
from evener.collectives.shared_memory import reduce_scatter as owners_module
from evener.collectives.shared_memory.reduce_scatter import SharedOwners
from evener.distributed.shm import slots
from evener.errors import ConfigurationError
from tests.tiers import ALWAYS, NIGHTLY, crossed

SIZES = ([3, 2, 1], [0, 5, 0], [0, 0, 0], [7, 0, 400_000], [300_001, 299_999, 1], [64, 64, 64])


def opened(kind: str) -> RangeOwners:
    assert dist.group.WORLD is not None
    return NativeOwners(dist.group.WORLD) if kind == "native" else SharedOwners(dist.group.WORLD, 60)


def term(rank: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (sum(sizes),), generator=generator).to(dtype)


def summed_and_gathered(kind: str, dtype: torch.dtype) -> bool:
    rank = dist.get_rank()
    with closing(opened(kind)) as owners:
        for sizes in SIZES:
            terms = [term(of, sizes, dtype) for of in range(3)]
            expected = torch.stack(terms).sum(0, dtype=dtype)
            waits = [owners.summed(terms[rank], sizes) for _ in range(2)]
            for wait in waits:
                assert torch.equal(wait(), expected.split(sizes)[rank])
            flat = torch.full_like(expected, 100)
            flat.split(sizes)[rank].copy_(expected.split(sizes)[rank])
            owners.gather(flat, sizes)
            assert torch.equal(flat, expected)
    return True


def kinds() -> list[str]:
    """What is made for each name, also where memory cannot be shared."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    for name in (None, "native", "shared-memory"):
        with closing(make_owners(name, group, 60)) as owners:
            found.append(owners.words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "_ORDERED_MACHINES", ())
        with closing(make_owners(None, group, 60)) as owners:
            found.append(owners.words)
        with pytest.raises(ConfigurationError, match="no exchange with owners through shared memory"):
            make_owners("shared-memory", group, 60)
    with pytest.raises(ConfigurationError, match="'ring' brings the sum to all ranks"):
        make_owners("ring", group, 60)
    closed = opened("shared")
    closed.close()
    with pytest.raises(ConfigurationError, match="has been closed"):
        closed.gather(torch.ones(2), [1, 1])
    with closing(opened("shared")) as owners, pytest.raises(ConfigurationError, match="carries CPU tensors"):
        owners.gather(torch.ones(2, device="meta"), [1, 1])
    return found


def test_memory_is_shared_where_it_can_be(ranks: Any) -> None:
    for found in ranks(2).run(kinds):
        assert found == ["shared-memory", "native", "shared-memory", "native"]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    crossed(
        [torch.float64, torch.float32, torch.bfloat16, torch.complex64],
        ["native", "shared"],
        lambda _: (ALWAYS, NIGHTLY),
    ),
)
def test_ranges_of_any_lengths(ranks: Any, kind: str, dtype: torch.dtype) -> None:
    assert all(ranks(3).run(summed_and_gathered, kind, dtype))


def copied_of_what_was_summed() -> int:
    """How many of many sums went through slots."""
    rank, sizes = dist.get_rank(), [300, 70_000, 5]
    with (
        closing(opened("shared")) as owners,
        mock.patch.object(
            SharedOwners,
            "_summed_through_slots",
            autospec=True,
            side_effect=SharedOwners._summed_through_slots,
        ) as through_slots,
    ):
        owners.prepare(8 * sum(sizes))
        for turn in range(12):
            terms = [term(of + turn, sizes, torch.float64) for of in range(3)]
            own_memory = turn == 3 and rank == 2
            flat = torch.empty_like(terms[0]) if own_memory else owners.room(terms[0], sum(sizes))
            own = owners.summed(flat.copy_(terms[rank]), sizes)()
            assert torch.equal(own, torch.stack(terms).sum(0).split(sizes)[rank])
        return through_slots.call_count


def test_terms_in_rooms_are_added_where_they_lie(ranks: Any) -> None:
    # Of the turn in which one rank had memory of its own.
    assert ranks(3).run(copied_of_what_was_summed) == [1] * 3


def more_rooms_than_there_are() -> None:
    with closing(opened("shared")) as owners:
        owners.prepare(800)
        like = torch.empty(0, dtype=torch.float64)
        flats = [owners.room(like, 100) for _ in range(4)] + [owners.room(like, 101)]
        assert len({flat.data_ptr() for flat in flats}) == 5
        for number, flat in enumerate(flats):
            flat.fill_(number + dist.get_rank())
        for number, flat in enumerate(flats):
            own = owners.summed(flat, [len(flat) - 40, 40])()
            assert (own == 2 * number + 1).all()
        assert owners.room(like, 100).data_ptr() in {flat.data_ptr() for flat in flats[:2]}


def test_what_finds_no_room_is_copied(ranks: Any) -> None:
    ranks(2).run(more_rooms_than_there_are)


def bytes_of_rooms(nbytes: int) -> int:
    with closing(opened("shared")) as owners, mock.patch.object(owners_module, "_MOST_ROOM_NBYTES", 1000):
        owners.prepare(nbytes)
        assert owners.room(torch.empty(0), 251).data_ptr() not in owners._lent
        flats = [torch.ones(251).mul_(dist.get_rank() + 1) for _ in range(2)]
        assert all((owners.summed(flat, [200, 51])() == 3).all() for flat in flats)
        return int(owners._rooms[0].owner.nbytes)


def test_rooms_are_no_larger_than_is_of_use(ranks: Any) -> None:
    assert ranks(2).run(bytes_of_rooms, 10**12) == [2000, 2000]
    assert ranks(2).run(bytes_of_rooms, 400) == [800, 800]


def rooms_of_a_step_that_raised() -> tuple[bool, bool]:
    with closing(SharedOwners(dist.group.WORLD, 60)) as owners:
        owners.prepare(4000)
        like = torch.empty(0)
        lost = [owners.room(like, 100) for _ in range(2)]
        places = {flat.data_ptr() for flat in lost}
        kept = lost.pop()
        beyond = owners.room(like, 100).data_ptr() in places
        del lost
        found = owners.room(like, 100)
        again = found.data_ptr() in places and found.data_ptr() != kept.data_ptr()
        for flat in (kept, found):
            flat.fill_(1.0)
            assert owners.summed(flat, [50, 50])().eq(2.0).all()
        return beyond, again


def test_the_room_of_a_tensor_that_was_never_summed_is_lent_again(ranks: Any) -> None:
    assert ranks(2).run(rooms_of_a_step_that_raised) == [(False, True)] * 2
