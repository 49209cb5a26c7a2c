from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evener.distributed.ddp_profiler.profiler import PAYLOADS, DdpProfiler, StepTimes

DELAY_SECONDS = 0.03


class Late(nn.Module):
    """One rank comes late."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self._rank:
            time.sleep(DELAY_SECONDS)
        return x


def train(late: int = -1, data: Dataset[Any] | None = None, **options: Any) -> Tensor:
    """Five steps over samples of 6 numbers; the weights at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Late(late), nn.BatchNorm1d(8), nn.Linear(8, 3))
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    samples = data or TensorDataset(
        torch.rand(20, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    )
    for (inputs,) in DataLoader(samples, batch_size=4):
        optimizer.zero_grad()
        ddp(inputs).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def observed(**options: Any) -> tuple[int, StepTimes, bool]:
    """What an onlooker sees, and whether the weights are those without one."""
    alone = train(**options)
    with DdpProfiler() as onlooker:
        weights = train(**options)
    return onlooker.steps, onlooker.mean, torch.equal(alone, weights)


NUMBERS = 6 * 8 + 8 + 2 * 8 + 8 * 3 + 3
BUFFERS = (2 * 8 * 4) + 8
"""Bytes of BatchNorm's statistics, in float32, and of its count, in int64."""


def test_steps_samples_and_collectives_are_counted_and_nothing_is_changed(ranks: Any) -> None:
    for steps, mean, same in ranks(2).run(observed):
        assert same
        assert (steps, mean.samples) == (4, 4)
        assert mean.collectives == 2  # the bucket, and the buffers that DDP broadcasts
        assert mean.nbytes == 4 * NUMBERS + BUFFERS
        assert 0 < mean.compute_seconds < mean.seconds


def test_options_of_ddp_change_what_is_sent(ranks: Any) -> None:
    for _, mean, same in ranks(2).run(observed, broadcast_buffers=False, find_unused_parameters=True):
        assert same
        assert (mean.collectives, mean.nbytes) == (2, 4 * NUMBERS)  # the bucket, and the map of the unused


def test_a_rank_that_waits_for_a_late_one_has_not_worked(ranks: Any) -> None:
    for (_, first, _), (_, second, _) in [
        ranks(2).run(observed, late=1),
        ranks(2).run(observed, late=0)[::-1],
    ]:
        assert first.compute_seconds < DELAY_SECONDS <= second.compute_seconds
        assert first.rest_seconds > second.rest_seconds


class SlowToRead(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor]:
        time.sleep(DELAY_SECONDS / 4)
        return (torch.full((6,), float(index)),)


def test_waiting_for_samples_is_no_work(ranks: Any) -> None:
    for _, mean, _ in ranks(2).run(observed, data=SlowToRead()):
        assert mean.compute_seconds < DELAY_SECONDS <= mean.input_seconds


def by_hand() -> tuple[float, float, float]:
    """Without DDP: each gradient through a collective that the script calls, and one on another thread."""
    weight = nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([weight], 0.1)
    with DdpProfiler() as onlooker:
        for _ in range(3):
            weight.sum().backward()
            if dist.get_rank() == 1:
                time.sleep(DELAY_SECONDS)
            dist.all_reduce(weight.grad)
            parts = [torch.empty(2), torch.empty(2)]
            thread = threading.Thread(target=dist.all_gather, args=(parts, torch.ones(2)))
            thread.start()
            thread.join()
            optimizer.step()
    return onlooker.mean.collectives, onlooker.mean.nbytes, onlooker.mean.compute_seconds


def test_collectives_that_a_script_calls_itself(ranks: Any) -> None:
    for collectives, nbytes, seconds in ranks(2).run(by_hand):
        assert (collectives, nbytes) == (2, 48)
        assert seconds > 0


def accumulated() -> float:
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with DdpProfiler() as unaware:  # the model is older
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
    assert unaware.mean.collectives == 0
    with DdpProfiler() as onlooker:
        model = DistributedDataParallel(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            with model.no_sync():
                model(torch.ones(2, 6)).sum().backward()
            model(torch.ones(2, 6)).sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 6))
            optimizer.step()
    return onlooker.mean.collectives


def test_accumulation_exchanges_once(ranks: Any) -> None:
    assert ranks(2).run(accumulated) == [1, 1]


def test_everything_is_put_back() -> None:
    names = [*PAYLOADS, "is_initialized"]
    before = [getattr(dist, name) for name in names]
    with DdpProfiler():
        assert dist.all_reduce is not before[0]
        assert dist.all_reduce is dist.distributed_c10d.all_reduce
    assert [getattr(dist, name) for name in names] == before
    assert [getattr(dist.distributed_c10d, name) for name in names] == before
