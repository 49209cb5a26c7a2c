from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from evener.distributed import hosts
from evener.distributed.control_channel import GroupChannel
from evener.distributed.hosts import destroy
from evener.distributed.watchdog.watchdog import Watchdog
from evener.torch_internals.process_groups import groups_open


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """One of a rank alone, beside the default group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = dist.new_group([0])
    assert isinstance(made, dist.ProcessGroup)
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_is_given_back_and_the_others_stay(group: dist.ProcessGroup) -> None:
    destroy(group)
    assert groups_open() == 1
    destroy(None)
    assert not dist.is_initialized()


def test_who_has_shut_all_down_can_still_close_what_stood_on_a_group(group: dist.ProcessGroup) -> None:
    channel = GroupChannel(group, Watchdog(0, 1, HashStore()))
    dist.destroy_process_group()
    channel.close()
    destroy(None)


def failing(*groups: dist.ProcessGroup | None) -> None:
    with ExitStack() as stack:
        for each in groups:
            stack.callback(destroy, each)
        raise ValueError("of one rank")


def test_an_error_is_told_before_other_ranks_destroy_their_groups(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL destroys a group when all of its ranks do, and the others may wait for the rank that has failed."""
    monkeypatch.setattr(hosts, "_DESTROYED_ALONE", {"fake"})
    with pytest.raises(ValueError, match="of one rank"):
        failing(None, group)
    assert groups_open() == 2
    destroy(group)
    assert groups_open() == 1


def test_an_error_that_is_handled_while_a_run_goes_on_keeps_none_of_its_groups(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may begin another run where it handles the error of the run before."""
    monkeypatch.setattr(hosts, "_DESTROYED_ALONE", {"fake"})
    try:
        raise MemoryError
    except MemoryError:
        with hosts.beside_a_handled_error():
            destroy(group)
    assert groups_open() == 1


def test_an_error_keeps_no_group_that_a_rank_destroys_alone(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="of one rank"):
        failing(group)
    assert groups_open() == 1
