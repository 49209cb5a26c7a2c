"""On a GPU nothing blocks the host in a step of a prepared loop: loops on a stand-in, whose numbers are not there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.components.gradients import Unsound
from evener.training.prepare import dataloader
from evener.training.prepare import prepare as preparing
from evener.training.prepare.replicas import LoopReplicas
from tests.ids import placeless
from tests.standin import HostWaitsError, StandIn
from tests.training.prepare.running import with_settings

CLASSES = 3
Pass = Callable[[nn.Module, Any, Tensor, Tensor], Tensor]


def model() -> nn.Module:
    """Of more than a megabyte, so that sums begin in backward."""
    return nn.Sequential(nn.Linear(6, 600), nn.BatchNorm1d(600), nn.Linear(600, 600), nn.Linear(600, CLASSES))


def plain(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = loss(model(x), y)
    found.backward()
    return found


def clipped(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    found = plain(model, loss, x, y)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return found


def several(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """Losses in a sum that is scaled, after a pass whose gradients stay here for now."""
    with evener.no_sync():
        plain(model, loss, x, y)
    outputs = model(x)
    found: Tensor = loss(outputs, y) / 2 + 0.1 * loss(outputs * 2, y)
    (found * torch.full((), 1024.0, device=x.device)).backward()
    return found


def of_each(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """Terms whose number the device counts."""
    each = F.cross_entropy(model(x), y, reduction="none")
    kept = y != 1
    found: Tensor = evener.global_mean((each * kept).sum() / kept.sum(), kept.sum())
    found.backward()
    return found


def evaluated(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = loss(model(x), y)
    return found


def looking(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    found = plain(model, loss, x, y)
    found.item()
    return found


def trained(run: Pass, world_size: int, steps: int = 5) -> StandIn:
    device = StandIn()
    data = TensorDataset(torch.randn(48, 6), torch.arange(48) % CLASSES)
    with (
        device.session(world_size - 1, world_size) as session,
        patch.object(preparing, "Session", lambda *_, **__: nullcontext(session)),
        patch.object(dataloader, "WITH_STREAMS", ("meta",)),
        patch.object(Unsound, "name_of", lambda *_: None),  # all numbers that are read are 1
        patch.object(LoopReplicas, "own_row", lambda *_: (0.0, 0.0, 0.0)),  # compares rarely, and waits
        with_settings(allreduce="native"),
    ):
        net, loader, loss = evener.prepare(model(), DataLoader(data, batch_size=8), nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        total = torch.zeros((), device=session.device)
        batches = iter(loader)
        with device.watched():
            for _ in range(steps):
                x, y = next(batches)
                device.now += 1
                total += run(net, loss, x, y).detach()
                optimizer.step()
                optimizer.zero_grad()
    return device


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("run", [plain, clipped, several, of_each, evaluated], ids=placeless)
def test_no_step_waits_for_the_device(run: Pass, world_size: int) -> None:
    assert trained(run, world_size).constants == []


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_loop_that_looks_at_the_loss_is_found_out(world_size: int) -> None:
    with pytest.raises(HostWaitsError, match=r"step 0: _local_scalar_dense reads the device"):
        trained(looking, world_size)
