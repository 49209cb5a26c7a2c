from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.distributed.mesh import Layout
from evener.distributed.session import Session
from evener.errors import ConfigurationError, RankError, RankTimeoutError
from evener.hardware.timers import HostStopwatch
from evener.nn import exact_batch_norm
from evener.nn.batch_norm_peers import PeerRanks, Peers
from evener.strategies import normalize_together
from evener.strategies.batch_norm_shm import Neighbors


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def message(rank: int, turn: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + turn)
    return torch.randn(length, generator=generator, dtype=torch.float64)


def gather_many(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Through neighbors and through the group; the ranks come at different times."""
    neighbors, rank = Neighbors(world(), 20), dist.get_rank()
    found = []
    for turn, length in enumerate(lengths):
        own = message(rank, turn, length)
        if turn % 4 == rank:
            time.sleep(0.003)
        later = neighbors.all_gather_later(own, f"layer {turn}")
        gathered = later()
        own.zero_()
        found.append((gathered, neighbors.all_reduce_later(message(rank, turn, length), "layer")()))
    neighbors.close()
    return found


def test_messages_of_any_length_arrive_in_the_order_of_ranks(ranks: Any) -> None:
    lengths = [1, 5, 129, 5, 8192, 8193, 1, 60_000, 5] + [17] * 20
    answers = ranks(3).run(gather_many, lengths)
    for turn, length in enumerate(lengths):
        sent = torch.stack([message(rank, turn, length) for rank in range(3)])
        for found in answers:
            gathered, summed = found[turn]
            assert torch.equal(gathered, sent)
            assert torch.equal(summed, sent.sum(0))


def come_to_different_layers() -> list[str]:
    neighbors, rank = Neighbors(world(), 20), dist.get_rank()
    errors = []
    later = neighbors.all_gather_later(
        torch.zeros(9 + 4 * rank, dtype=torch.float64), f"layer{rank}.bn, forward"
    )
    with pytest.raises(ConfigurationError) as caught:
        later()
    errors.append(str(caught.value))
    with pytest.raises(RankError) as again:
        neighbors.all_gather_later(torch.zeros(9), "layer0.bn")
    errors.append(str(again.value))
    return errors


def test_ranks_at_different_layers_are_told_which(ranks: Any) -> None:
    for words, again in ranks(2).run(come_to_different_layers):
        assert (
            "rank 0 to 9 numbers (float64) of layer0.bn, forward, rank 1 to 13 numbers (float64) of layer1.bn"
            in words
        )
        assert again.startswith("an earlier exchange of BatchNorm failed: the ranks came to different layers")


def wait_for_rank_1() -> list[str]:
    with mock.patch("evener.distributed.shm.slots.backstop", lambda seconds: seconds):
        errors = []
        for gone in (False, True):
            neighbors = Neighbors(world(), 0.2)
            if dist.get_rank() == 0:
                with (
                    mock.patch("evener.distributed.shm.slots.has_died", return_value=gone),
                    pytest.raises(RankError if gone else RankTimeoutError) as caught,
                ):
                    neighbors.all_gather_later(torch.zeros(3), "bn")()
                errors.append(str(caught.value))
            dist.barrier()
        return errors


def test_a_rank_that_does_not_come_is_named(ranks: Any) -> None:
    (late, dead), _ = ranks(2).run(wait_for_rank_1)
    assert "s in exchange of BatchNorm 1 through shared memory: rank 1 (process " in late
    assert "rank 1 (process " in dead
    assert dead.endswith(
        "(exchange of BatchNorms begun: 0), in exchange of BatchNorm 1 through shared memory"
    )


def misuse() -> list[str]:
    neighbors, errors = Neighbors(world(), 20), []
    neighbors.all_gather_later(torch.zeros(3), "bn1")
    with pytest.raises(RankError) as caught:
        neighbors.all_gather_later(torch.zeros(3), "bn2")
    errors.append(str(caught.value))
    neighbors.close()
    with pytest.raises(ConfigurationError) as closed:
        neighbors.all_gather_later(torch.zeros(3), "bn1")
    return [*errors, str(closed.value)]


def test_a_message_given_up_and_a_closed_exchange_are_said(ranks: Any) -> None:
    for given_up, closed in ranks(2).run(misuse):
        assert given_up == "an earlier exchange of BatchNorm was given up: 3 numbers (float32) of bn1"
        assert "has been closed with their run" in closed


def time_work(sleep_seconds: float) -> float:
    neighbors = Neighbors(world(), 20)
    with HostStopwatch() as watch:
        if dist.get_rank() == 1:
            time.sleep(sleep_seconds)
        neighbors.all_gather_later(torch.zeros(3), "bn")()
        watch.mark()
    return watch.seconds()


def test_waiting_is_no_work(ranks: Any) -> None:
    first, second = ranks(2).run(time_work, 0.3)
    assert first < 0.2
    assert second > 0.2


def kinds_of_peers() -> list[str]:
    found = []
    with Session(device="cpu") as session:
        for patched in ("x86_64", "aarch64"):
            with mock.patch("platform.machine", return_value=patched):
                mesh = session.lay(Layout({"data": 2}))
                model = normalize_together(nn.Sequential(nn.BatchNorm1d(3)), mesh)
            peers: Peers = model[0]._ranks.value
            found.append(type(peers).__name__)
            model(torch.ones(2, 3) * session.rank)
            assert float(model[0].running_mean[0]) == pytest.approx(0.05)
    return found


def test_ranks_of_one_host_share_memory_and_others_send_messages(ranks: Any) -> None:
    assert ranks(2).run(kinds_of_peers) == [["Neighbors", "PeerRanks"]] * 2


def bits_of_three_ways(shares: list[int]) -> list[Tensor]:
    """Output, gradient and running statistics through shared memory, through the group, and on one device."""
    rank, found = dist.get_rank(), []
    x, dy = torch.randn(
        2, sum(shares), 6, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for peers in (Neighbors(world(), 20), PeerRanks(world()), None):
        module = exact_batch_norm(nn.BatchNorm2d(6).double(), peers)
        mine = (x if peers is None else x.split(shares)[rank]).clone().requires_grad_()
        y = module(mine)
        y.backward(dy if peers is None else dy.split(shares)[rank])
        parts = [y.detach(), mine.grad]
        parts = [part.split(shares)[rank] for part in parts] if peers is None else parts
        found.append(
            torch.cat([*(part.flatten() for part in parts), module.running_mean, module.running_var])
        )
    return found


def test_shared_memory_changes_no_number(ranks: Any) -> None:
    for shared, sent, alone in ranks(3).run(bits_of_three_ways, [4, 1, 2]):
        torch.testing.assert_close(shared, sent, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)
