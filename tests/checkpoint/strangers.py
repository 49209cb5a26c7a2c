"""A checkpoint as who can write its files would leave it, and the doors that it may come in by."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from evener import checkpoint
from evener.checkpoint.checksums import SUMS, sum_of
from evener.checkpoint.weights_file import export, filler
from evener.core.config.run_config import RunConfig
from evener.training.engine import Engine
from tests import tasks


def summed(place: Path) -> None:
    """Who can write the files can write their checksums."""
    names = [path.name for path in place.iterdir() if path.name != SUMS and path.is_file()]
    (place / SUMS).write_text(json.dumps({name: sum_of(place / name) for name in names}))


def entered(door: str, place: Path) -> None:
    if door == "find":
        checkpoint.find(place)
    elif door == "export":
        export(place)
    elif door == "weights":
        filler(RunConfig(weights=place))(torch.nn.Linear(1, 1))
    else:
        with Engine(tasks.plain(), device="cpu", dtype="float64", steps=2) as engine:
            engine.load(place)
