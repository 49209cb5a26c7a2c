"""Runs a model on the first samples of its task, before it is divided, to find which layers can be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.model_init import in_type
from evener.data.batch import map_leaves
from evener.data.fetch import first_inputs
from evener.distributed import signals as interrupt
from evener.hardware import accelerators
from evener.strategies.learner import Learner
from evener.strategies.tensor.candidates import TriedRegion
from evener.strategies.tensor.region_trials import Trials

_SAMPLES = 2

Found = tuple[tuple[TriedRegion, ...], dict[str, str]]
"""Regions, and by layer the reason why it is in none."""


def tried(model: nn.Module, learner: Learner, taken: Iterable[str], axis: str) -> Found:
    """Returns the regions that the first samples show, the same on all ranks. All ranks must call this together.

    Args:
        model: May be on the meta device; it stays unchanged.
        learner: Does not have a model yet.
        taken: Modules that are divided already.
        axis: Mesh axis over which the model is divided.
    """
    own: Found = (), {}
    ranks = learner.mesh.degree(axis)
    if ranks > 1:
        device, dtype = learner.session.device, learner.settings.weight_type
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        trials = Trials(model, [*taken], ranks, device, kind)
        if trials.pairs():
            own = _run(trials, lambda: _call(model, learner, kind), device)
    rows: list[Found] = learner.session.control.gather_objects(own)
    return rows[0]


def _run(trials: Trials, call: Callable[[], Callable[[], Any]], device: torch.device) -> Found:
    reasons: dict[str, str] = {}
    try:
        with accelerators.generators_kept(device):
            trials.run(call())
    except Exception as error:
        interrupt.check()
        reasons["the rest"] = f"it could not be run on the first samples: {error}".partition("\n")[0]
    return tuple(trials.found), trials.reasons | reasons


def _call(model: nn.Module, learner: Learner, dtype: torch.dtype) -> Callable[[], Any]:
    """Returns a function that calls the model as the task does."""
    task, device = learner.task, learner.session.device
    inputs = first_inputs(task.train, task.collate, _SAMPLES)

    def moved(leaf: Any) -> Any:
        return leaf.to(device, in_type(leaf, dtype), copy=True) if isinstance(leaf, Tensor) else leaf

    return lambda: task.forward(model, map_leaves(moved, inputs))
