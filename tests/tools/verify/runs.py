"""Made-up runs of one parameter, one buffer and two steps, for tests that need no training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evener.core.config.run_config import RunConfig
from evener.tools.verify import Trajectory, Verification
from evener.tools.verify.comparison import ComparedRuns, RunDistance, compare

EPS = 2.0**-52


def run(**changes: Any) -> Trajectory:
    """Two steps of a layer ``fc`` with a key bias, of whose gradient only rounding is left."""
    gradients = [
        {"fc.weight": torch.tensor([3.0, 4.0], dtype=torch.float64), "key": vector(3e-17)},
        {"fc.weight": torch.tensor([1.0, 2.0], dtype=torch.float64), "key": vector(-2e-17)},
    ]
    usual = Trajectory(
        losses=[1.0, 0.5],
        weights={"fc.weight": torch.tensor([1.0, 2.0]).double(), "key": vector(0.1), "mean": vector(1.0)},
        digest="d",
        shapes={"fc.weight": (2,), "key": (1,)},
        gradients=gradients,
        moved={"fc.weight": 0.5, "key": 0.1},
        buffers={"mean": vector(0.5)},
    )
    return dataclasses.replace(usual, **changes)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def disturbed(ulps: float = 4, key: float = -0.1) -> Trajectory:
    """The same but for rounding: losses, gradients and weights differ by ``ulps`` units in the last place."""
    factor = 1 + ulps * EPS
    usual = run()
    gradients = [{"fc.weight": step["fc.weight"] * factor, "key": -step["key"]} for step in usual.gradients]
    weights = {name: value * factor for name, value in usual.weights.items()} | {"key": vector(key)}
    return run(losses=[loss * factor for loss in usual.losses], gradients=gradients, weights=weights)


def scaled(factor: float, steps: Sequence[int] = (0, 1), **changes: Any) -> Trajectory:
    """The gradients of some steps are off by a factor."""
    gradients = [
        {name: value * (factor if step in steps else 1.0) for name, value in sketches.items()}
        for step, sketches in enumerate(run().gradients)
    ]
    return run(gradients=gradients, **changes)


def compared(*divided: Trajectory, reference: Trajectory | None = None, **options: Any) -> Verification:
    tolerance, others = options.pop("tolerance", None), options.pop("disturbed", (disturbed(),))
    config = RunConfig(dtype="float64", batch_size=4, batch_norm=options.pop("batch_norm", "exact"))
    one = reference or run()
    apart = [RunDistance.from_runs(one, other) for other in others]
    return compare(ComparedRuns(one, divided, apart, **options), config, "name", tolerance)
