"""How far two sets of weights lie apart, in one number, and runs that are handed on from place to place."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.tools.verify import relative_error
from evener.training.engine import Engine


def worst(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest relative error of any; NaN if one is, which Python's ``max`` may pass over."""
    assert reference.keys() == other.keys()
    errors = [relative_error(value, other[name]) for name, value in reference.items()]
    return torch.tensor(errors, dtype=torch.float64).max().item()


Place = tuple[int, Mapping[str, Any]]
"""How many ranks, and their settings."""


def handed_on(
    ranks: Any, task: Callable[[], Task], places: Sequence[Place], until: Sequence[int]
) -> list[dict[str, Any]]:
    """A run that each place takes on from the checkpoint of the one before; the states of the last one's ranks.

    Args:
        until: After which step each place leaves it.
    """
    states, first = list[dict[str, Any]](), 0
    with tempfile.TemporaryDirectory() as directory:
        for (size, settings), then in zip(places, until, strict=True):
            states = ranks(size).run(_leg, directory, task, first, then, settings)
            first = then
    return states


def _leg(
    directory: str, task: Callable[[], Task], first: int, then: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    config = RunConfig(**{"device": "cpu", "dtype": "float64", "steps": then} | dict(settings))
    with Engine(task(), config) as engine:
        if first:
            engine.load(Path(directory))
        for batch in engine.batches():
            engine.step(batch)
            if engine.steps_done == engine.feed.last_step:
                engine.save(Path(directory))  # in the midst of the loop, as a run does at the end of an epoch
        return engine.state_dict()


def trained_by_hand(
    task: Callable[[], Task],
    total: Callable[[Any, Any], Tensor],
    count: Callable[[Any], Any],
    **settings: Any,
) -> dict[str, Tensor]:
    """The weights after an epoch in a loop of the user's own, on one rank of several that call this."""
    config = RunConfig(device="cpu", dtype="float64", epochs=1, clip_norm=0.1, **settings)
    with Engine(task(), config) as engine:
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            engine.backward(total(engine.model(micro.inputs), micro.targets), count(micro.targets))
            engine.update()
        return {name: value.detach().clone() for name, value in engine.learner.tensors().items()}
