from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from evener.errors import EvenerError
from evener.hardware.memory import CATEGORIES, MemoryLimitError, MemoryTracker, made_as
from evener.hardware.memory.tracker import rounded
from evener.torch_internals.dispatch import fake_mode

KIB = 256
"""Floats of 4 bytes."""


def test_storages_count_once_while_they_live() -> None:
    with MemoryTracker() as account:
        a = torch.empty(KIB)
        views = a.view(16, 16), a[3:], a.detach()
        assert account.held == 1024
        a.add_(1)
        b = a + 1
        assert account.held == 2048
        del a
        assert account.held == 2048
        del views
        assert account.held == 1024
        del b
    assert (account.held, account.peak) == (0, 2048)


def test_what_was_there_before_counts_when_it_is_named() -> None:
    before = torch.empty(KIB)
    with MemoryTracker() as account:
        view = before.view(2, -1)
        before.mul_(2)
        assert account.held == 0
        account.name("inputs", [view, None, before])
        assert account.by_category() == dict.fromkeys(CATEGORIES, 0) | {"inputs": 1024}
        with pytest.raises(ValueError, match="no category 'input'"):
            account.name("input", [before])


def test_what_is_resized_is_counted_anew() -> None:
    with MemoryTracker() as account:
        a = torch.empty(KIB)
        a.untyped_storage().resize_(0)
        assert (account.held, account.peak) == (0, 1024)
        a.untyped_storage().resize_(2048)
        assert account.by_category()["buckets"] == 2048
        b = torch.empty(KIB)
        b.resize_(3 * KIB)
        assert account.held == 2048 + 3072
        assert account.at_peak()["activations"] == 3072
    resized = torch.empty(4)
    resized.untyped_storage().resize_(64)  # nobody listens any more
    assert account.held == 2048 + 3072


def test_sparse_tensors_count_by_what_they_are_made_of() -> None:
    with MemoryTracker() as account:
        embedding = nn.Embedding(100, 16, sparse=True)
        account.name("parameters", embedding.parameters())
        embedding(torch.arange(4)).sum().backward()
        account.name("gradients", [embedding.weight.grad])
    assert account.by_category()["gradients"] == 4 * 16 * 4 + 4 * 8


def test_tensors_of_other_devices_and_shapes_alone_do_not_count() -> None:
    with MemoryTracker() as account:
        torch.empty(KIB, device="meta") + 1
        with fake_mode():
            torch.empty(KIB) + 1
    assert account.peak == 0
    with MemoryTracker(device_type="cuda") as account:
        torch.empty(KIB) + 1
    assert account.peak == 0


@pytest.mark.parametrize(
    ("nbytes", "device", "takes"), [(0, "cuda", 0), (1, "cuda", 512), (513, "cuda", 1024), (513, "cpu", 513)]
)
def test_sizes_are_those_of_the_allocator(nbytes: int, device: str, takes: int) -> None:
    assert rounded(nbytes, device) == takes


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def through(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(Twice.apply(x * weight))  # type: ignore[no-any-return, no-untyped-call]


def recomputed(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = checkpoint(through, x, weight, use_reentrant=False)
    return made


@pytest.mark.parametrize("forward", [through, recomputed])
@pytest.mark.parametrize("mode", [None, fake_mode], ids=["real", "fake"])
def test_backward_is_seen_and_told_from_forward(
    forward: Callable[[Tensor, Tensor], Tensor], mode: Callable[[], Any] | None
) -> None:
    """What checkpointing makes once more in backward is an activation."""
    around = mode() if mode else torch.enable_grad()
    with around, MemoryTracker() as account:
        weight = torch.ones(KIB, requires_grad=True)
        account.name("parameters", [weight])
        x = torch.ones(KIB)
        loss = forward(x, weight).sum()
        before = account.by_category()
        account.reset_peak()
        loss.backward()
        account.name("gradients", [weight.grad])
    assert before["parameters"] == 1024
    assert before["other"] == 0
    # x, and what relu or, where everything is made anew, checkpointing keeps; the loss
    assert before["activations"] == (2048 if forward is through else 1024) + 4
    assert account.by_category()["gradients"] == 1024
    assert account.at_peak()["other"] >= 1024  # a gradient on its way
    if forward is recomputed:
        assert account.at_peak()["activations"] >= before["activations"] + 1024


def test_who_makes_memory_may_say_what_it_is_for() -> None:
    with MemoryTracker() as account:
        with made_as("buckets"):
            bucket = torch.empty(KIB)
            with made_as("other"):
                other = torch.empty(KIB)
        rest = bucket + other
    assert account.by_category() == dict.fromkeys(CATEGORIES, 0) | {
        "buckets": 1024,
        "other": 1024,
        "activations": rest.nbytes,
    }


def test_above_the_limit_an_operator_fails_as_on_a_gpu_that_is_full() -> None:
    with MemoryTracker(limit=3000) as account:
        kept = [torch.empty(KIB)]
        with pytest.raises(torch.OutOfMemoryError) as failed:
            kept.append(torch.zeros(2 * KIB))
        assert isinstance(failed.value, MemoryLimitError)
        assert isinstance(failed.value, EvenerError)
        for word in ("aten.zeros", "asks for 2048 bytes", "1024 are held", "limit is 3000"):
            assert word in str(failed.value)
        del failed
        assert account.held == 1024  # what was too much is gone again
        account.limit = 3072
        kept.append(torch.zeros(2 * KIB))
        account.limit = None
        kept.append(torch.zeros(99 * KIB))


def test_a_backward_that_is_above_the_limit_fails_in_backward() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    with MemoryTracker() as account:
        loss = (weight * 2).exp().sum()
        account.limit = account.held
        with pytest.raises(MemoryLimitError):
            loss.backward()
        account.limit = None
        (weight * 2).sum().backward()


def test_divided_tensors_count_by_what_this_rank_holds(ranks: Callable[[int], Any]) -> None:
    assert ranks(2).run(_divided) == [[2048, 2048, 4096]] * 2


def _divided() -> list[int]:
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with MemoryTracker() as account:
        whole = DTensor.from_local(torch.empty(2 * KIB), mesh)
        found = [account.held]
        account.name("parameters", [whole])
        found.append(account.by_category()["parameters"])
        more = whole + 1
        found.append(account.held)
        del more
    return found


@pytest.mark.gpu
def test_a_gpu_allocates_what_is_counted() -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 7)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(64, 300, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # workspaces of cuBLAS are there from now on
    torch.cuda.synchronize()
    with MemoryTracker(device_type="cuda") as account:
        account.name("parameters", model.parameters())
        account.name("optimizer", [v for state in optimizer.state.values() for v in state.values()])
        apart = torch.cuda.memory_allocated() - account.held
        torch.cuda.reset_peak_memory_stats()
        account.reset_peak()
        step()
        torch.cuda.synchronize()
    assert account.peak == pytest.approx(torch.cuda.max_memory_allocated() - apart, rel=0.03)
    assert account.at_peak()["other"] > 0  # backward ran on another thread, and was seen
