"""What shares by speed gain on unequal devices, measured: one rank is slowed to 0.4 of its speed.

The same training with equal shares and with `balance="auto"`, in turns in the same processes, so that a busy machine is
busy for both. With speeds 1 and 0.4 the best there is would be 1.75 times as fast.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener

TURNS, STEPS = 9, 6


def task() -> evener.Task:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 256, generator=drawn)
    return evener.Task(
        model=lambda: nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=TensorDataset(inputs, (inputs.sum(1) > 0).long()),
    )


def rehearse() -> tuple[float, tuple[int, ...]]:
    """How many times as fast auto is as equal shares, and its shares at the end."""
    with evener.Session(device="cpu") as session:
        settings = {"session": session, "batch_size": 512, "epochs": 10**6, "throttle": "1,0.4"}
        engines = {
            balance: evener.Engine(task(), balance=balance, **settings) for balance in ("equal", "auto")
        }
        batches = {name: engine.batches() for name, engine in engines.items()}
        seconds: dict[str, list[float]] = {name: [] for name in engines}

        def steps(name: str, number: int) -> float:
            began = time.perf_counter()
            for _ in range(number):
                taken = engines[name].step(next(batches[name]))
            shares[name] = taken.batch.shares
            return time.perf_counter() - began

        shares: dict[str, tuple[int, ...]] = {}
        for name in engines:
            steps(name, 30)  # auto learns
        for _ in range(TURNS):
            for name in engines:
                seconds[name].append(steps(name, STEPS))
        for name, engine in engines.items():
            batches[name].close()
            engine.close()
    gains = [equal / auto for equal, auto in zip(seconds["equal"], seconds["auto"], strict=True)]
    return statistics.median(gains), shares["auto"]


if __name__ == "__main__":
    gain, taken = evener.launch(rehearse, processes=2, device="cpu")[0]
    print(f"shares {taken[0]} and {taken[1]} of 512: {gain:.1f}x of equal shares")
