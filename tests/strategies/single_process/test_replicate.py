"""Copies of a model on several devices: the host waits for what comes to it."""

from __future__ import annotations

import torch
from torch import nn

from evener.strategies.single_process.replicate import add_gradients, follow, take_buffers
from tests.waiting_copies import CPU, DEVICE, CopiesToHost


def model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(device)


def test_the_host_waits_for_weights_buffers_and_gradients() -> None:
    there, here = model(DEVICE), model(CPU)
    with CopiesToHost() as copies:
        follow(there, here)
    assert copies.waits == [True] * (4 + 3)
    with CopiesToHost() as copies:
        take_buffers(there, here)
    assert copies.waits == [True] * 3
    for each in (*there.parameters(), *here.parameters()):
        each.grad = torch.ones_like(each)
    with CopiesToHost() as copies:
        add_gradients([here, there], 0)
    assert copies.waits == [True] * 4
