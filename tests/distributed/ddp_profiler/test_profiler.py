from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evener.distributed.ddp_profiler import part_watch, profiler
from evener.distributed.ddp_profiler.exchange import PAYLOADS
from evener.distributed.ddp_profiler.profiler import PASSES_WITHOUT_OPTIMIZER, DdpProfiler
from evener.distributed.ddp_profiler.step_times import ObservedStep, StepTimes
from evener.distributed.ddp_profiler.timeline import PartClock, clock_of

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
    others = (torch.autograd, "backward"), (torch, "save"), (dist.Work, "wait"), (DataLoader, "__iter__")
    were = [getattr(owner, name) for owner, name in others]
    with DdpProfiler():
        assert dist.all_reduce is not before[0]
        assert dist.all_reduce is dist.distributed_c10d.all_reduce
    assert [getattr(dist, name) for name in names] == before
    assert [getattr(dist.distributed_c10d, name) for name in names] == before
    assert [getattr(owner, name) for owner, name in others] == were


def steps_of(train: Any, **options: Any) -> tuple[list[StepTimes], list[float], DdpProfiler]:
    """The steps that a profiler tells of, their losses, and the profiler."""
    found: list[ObservedStep] = []
    with DdpProfiler(lambda step, _: found.append(step)) as onlooker:
        train(**options)
    assert not onlooker.failure
    return [step.times for step in found], [step.loss for step in found], onlooker


def typical(steps: list[StepTimes]) -> StepTimes:
    """The median of each time: other programs may delay single steps."""
    return StepTimes(
        *(statistics.median(column) for column in zip(*(vars(step).values() for step in steps), strict=True))
    )


class LateBackward(torch.autograd.Function):
    """One rank comes late in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


def late_in_backward() -> list[StepTimes]:
    def train() -> None:
        model = DistributedDataParallel(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(8):
            LateBackward.apply(model(torch.ones(2, 6)), DELAY_SECONDS * dist.get_rank()).sum().backward()
            optimizer.step()

    return steps_of(train)[0]


def test_a_rank_that_is_late_in_backward_is_told_from_one_late_in_forward(ranks: Any) -> None:
    fast, slow = map(typical, ranks(2).run(late_in_backward))
    assert fast.backward_seconds < DELAY_SECONDS <= slow.backward_seconds
    assert slow.forward_seconds < DELAY_SECONDS
    assert fast.exchange_seconds > DELAY_SECONDS / 2 > slow.exchange_seconds
    (_, fast, _), (_, slow, _) = ranks(2).run(observed, late=1)
    assert slow.forward_seconds >= DELAY_SECONDS > slow.backward_seconds
    assert fast.exchange_seconds > DELAY_SECONDS / 2


def test_parts_of_a_step_add_up() -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.1)
        for (batch,) in DataLoader(TensorDataset(torch.ones(6, 3)), batch_size=2):
            (weight * batch).sum().backward()
            time.sleep(0.01)
            optimizer.step()

    steps, losses, _ = steps_of(train)
    assert [step.samples for step in steps] == [2, 2, 2]
    assert losses[0] == 6.0
    for step in steps:
        parts = ("forward", "backward", "exchange", "input", "update", "saving")
        assert sum(getattr(step, f"{part}_seconds") for part in parts) == pytest.approx(step.seconds)
        assert step.forward_seconds >= 0.01
        assert min(step.backward_seconds, step.input_seconds, step.update_seconds) > 0


def test_an_evaluation_between_two_steps_is_part_of_none(tmp_path: Path) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.1)
        train_set, other = TensorDataset(torch.ones(4, 3)), TensorDataset(torch.ones(8, 3))
        for _ in range(2):
            for (batch,) in DataLoader(train_set, batch_size=2):
                (weight * batch).sum().backward()
                optimizer.step()
            for _ in DataLoader(other, batch_size=2):
                time.sleep(DELAY_SECONDS)
                break
            torch.save(weight, tmp_path / "weight.pt")

    steps, _, _ = steps_of(train)
    assert [step.between_seconds > DELAY_SECONDS for step in steps] == [False, False, True, False]
    assert [step.saving_seconds > 0 for step in steps] == [False, False, True, False], "saves are told apart"
    assert max(step.seconds for step in steps) < DELAY_SECONDS
    assert {step.samples for step in steps} == {2}


def test_two_loaders_in_a_step_are_no_evaluation() -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.1)
        loaders = [DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2) for _ in range(2)]
        for (one,), (other,) in zip(*loaders, strict=True):
            (weight * (one + other)).sum().backward()
            optimizer.step()

    steps, _, _ = steps_of(train)
    assert [(step.between_seconds, step.samples) for step in steps[1:]] == [(0, 4)]


def test_several_optimizers_make_one_step() -> None:
    def train() -> None:
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        first, second = (torch.optim.SGD([weight], 0.1) for weight in weights)
        for _ in range(5):
            (weights[0] * weights[1]).sum().backward()
            first.step()
            second.step()
        for _ in range(4):
            (weights[0] * weights[1]).sum().backward()
            second.step()

    _, _, onlooker = steps_of(train)
    assert onlooker.steps == 4 + 4, "the first one is left out"


def test_without_an_optimizer_of_torch_backward_ends_a_step() -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(3))
        for _ in range(PASSES_WITHOUT_OPTIMIZER + 5):
            weight.sum().backward()
            with torch.no_grad():
                weight -= 0.1
                weight.grad = None

    steps, _, onlooker = steps_of(train)
    assert onlooker.steps == len(steps) == 4


def test_a_loss_has_no_factor_of_a_scaler_and_none_is_told_where_it_is_not_known() -> None:
    def train(passes: int) -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for (batch,) in DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2):
            for _ in range(passes):
                scaler.scale((weight * batch).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert steps_of(train, passes=1)[1] == [6.0, 6.0]
    assert all(math.isnan(loss) for loss in steps_of(train, passes=2)[1])


def test_saving_is_no_work(tmp_path: Path) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.1)
        for (batch,) in DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2):
            (weight * batch).sum().backward()
            optimizer.step()
            torch.save({"weight": weight}, tmp_path / "weight.pt")

    steps, _, _ = steps_of(train)
    assert steps[1].saving_seconds > 0 == steps[0].saving_seconds


def waits_in_background() -> list[StepTimes]:
    def train() -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(8):
            weight.sum().backward()
            time.sleep(DELAY_SECONDS * dist.get_rank())
            work = dist.all_reduce(weight.grad, async_op=True)
            work.wait()
            optimizer.step()

    return steps_of(train)[0]


def test_waits_for_collectives_in_the_background_are_no_work(ranks: Any) -> None:
    fast, slow = map(typical, ranks(2).run(waits_in_background))
    assert fast.exchange_seconds > DELAY_SECONDS / 2 > fast.compute_seconds
    assert slow.compute_seconds >= DELAY_SECONDS


def test_an_error_in_the_profiler_ends_the_profiling_and_not_the_script() -> None:
    def broken(*_: Any) -> None:
        raise OSError("the disk is full")

    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    with DdpProfiler(broken) as onlooker:
        for (batch,) in DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2):
            optimizer.zero_grad()
            (weight * batch).sum().backward()
            optimizer.step()
    assert onlooker.failure == "OSError: the disk is full"
    assert onlooker.steps == 0
    assert weight[0].item() == pytest.approx(1 - 4 * 0.2)


def test_an_error_of_the_script_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"), DdpProfiler() as onlooker:
        torch.ones(3).sum().backward()
    assert not onlooker.failure


def sizes() -> dict[tuple[str, int], int]:
    with DdpProfiler() as onlooker:
        train()
    return dict(onlooker.kinds)


def test_collectives_are_told_by_kind_and_size(ranks: Any) -> None:
    assert ranks(2).run(sizes) == [{("all_reduce", 4 * NUMBERS): 4, ("broadcast", BUFFERS): 4}] * 2


class Device:
    """Stands for a device that may be behind its host, and whose marks are dear."""

    is_behind = False

    def clock(self, _: torch.device) -> PartClock:
        host = clock_of(torch.device("cpu"))
        return host._replace(is_cheap=False, has_passed=lambda mark: not self.is_behind)


def test_the_profiler_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(part_watch, "clock_of", device.clock)
    monkeypatch.setattr(profiler, "_LINGER_SECONDS", 0.05)
    monkeypatch.setattr(profiler, "READ_SECONDS", 0.0)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    with DdpProfiler() as onlooker:
        for number in range(8):
            device.is_behind = number != 5
            weight.sum().backward()
            optimizer.step()
            assert onlooker.steps == (0 if number < 5 else 5)
    assert onlooker.steps == 5, "the end waits, but not for ever"


def test_short_steps_are_read_together_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ObservedStep] = []
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)

    def steps(number: int) -> int:
        for _ in range(number):
            weight.sum().backward()
            optimizer.step()
        return len(read)

    with contextlib.suppress(KeyError), DdpProfiler(lambda step, _: read.append(step)) as onlooker:
        monkeypatch.setattr(profiler, "READ_SECONDS", math.inf)
        assert steps(25) == 0
        monkeypatch.setattr(profiler, "READ_SECONDS", 0.0)
        assert steps(1) == 25, "all but the first one, whose begin is not known"
        monkeypatch.setattr(profiler, "READ_SECONDS", math.inf)
        assert steps(3) == 25
        raise KeyError("the script fails")
    assert len(read) == onlooker.steps == 28
    ends = [step.ended for step in read]
    assert ends == sorted(ends)


def late_in_backward_on_a_device() -> list[StepTimes]:
    """Where a mark is dear, the last gradient is marked alone."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(part_watch, "clock_of", Device().clock)
        return late_in_backward()


def test_where_marks_are_dear_the_last_gradient_has_one(ranks: Any) -> None:
    fast, slow = map(typical, ranks(2).run(late_in_backward_on_a_device))
    assert slow.backward_seconds >= DELAY_SECONDS > fast.backward_seconds
    assert fast.exchange_seconds > DELAY_SECONDS / 2 > slow.exchange_seconds


@pytest.mark.parametrize("broken", ["dataset_of", "samples_of", "part_seconds"])
def test_an_error_beside_a_call_leaves_the_call(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """As if PyTorch had changed what the profiler looks at."""

    def gone(*_: Any) -> None:
        raise AttributeError("gone")

    monkeypatch.setattr(profiler, broken, gone)
    with DdpProfiler() as onlooker:
        batches = [
            batch.sum().item() for (batch,) in DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)
        ]
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.1)
        weight.sum().backward()
        optimizer.step()
    assert batches == [6.0, 6.0]
    assert onlooker.failure == "AttributeError: gone"
