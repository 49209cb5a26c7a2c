"""One run of a row: uneven batches, shares, clipping and accumulation, evaluation, prediction and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.data.batch import map_leaves
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.errors import EvenerError
from evener.training.engine import Engine
from tests.conformance import models, public

STEPS, CLIP = 4, 0.4


@dataclass(frozen=True)
class Outcome:
    """What a run came to: numbers of one device's shapes."""

    numbers: dict[str, Tensor]
    refused: str = ""


def task_called(name: str) -> Task:
    """Of the table, or of the public models."""
    task: Task = getattr(models if hasattr(models, name) else public, name)()
    return task


def averaged(task: Task) -> Task:
    """With an average of the weights, which is evaluated too."""
    return replace(task, average=evener.ema(0.6, start=1))


def run(model: str, how: dict[str, Any], alone: bool = False) -> Outcome:
    """The steps of ``model``; a refusal is an outcome too, so that the ranks stay up."""
    settings = {
        "dtype": "float64",
        "device": "cpu",
        "steps": STEPS,
        "clip_norm": CLIP,
        "micro_batch": 6,
    } | how
    torch.set_default_dtype(torch.float32)
    try:
        with (
            Session("cpu", 60, Environment() if alone else None) as session,
            Engine(averaged(task_called(model)), RunConfig(**settings), session=session) as engine,
        ):
            return Outcome(_numbers(engine))
    except EvenerError as error:
        return Outcome({}, f"{type(error).__name__}: {error}")


def _numbers(engine: Engine) -> dict[str, Tensor]:
    losses = [torch.tensor(engine.step(batch).loss, dtype=torch.float64) for batch in engine.batches()]
    found = {f"loss {step}": loss for step, loss in enumerate(losses)}
    found |= {f"evaluation {name}": torch.tensor(value) for name, value in engine.evaluate().items()}
    found |= {f"output {place}": leaf for place, leaf in enumerate(_outputs(engine))}
    state = engine.state_dict()
    found |= {f"weight {name}": value for name, value in state["model"].items() if isinstance(value, Tensor)}
    found |= {f"average {name}": value for name, value in state["average"].items()}
    for name, entries in state["optimizer"]["state"].items():
        found |= {f"state {name} {key}": v for key, v in entries.items() if isinstance(v, Tensor)}
    return {name: value.detach().clone() for name, value in found.items()}


def _outputs(engine: Engine) -> list[Tensor]:
    leaves: list[Tensor] = []
    map_leaves(leaves.append, engine.predict(engine.task.train, everywhere=True))
    return leaves
