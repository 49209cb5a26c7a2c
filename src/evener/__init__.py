"""Evener: train one PyTorch model on all the devices there are, equal or not, as if they were one device.

::

    import evener

    evener.fit("digits", processes=2)                       # a whole run
    evener.verify("digits", processes=3)                    # the proof that dividing the work changed nothing
    evener.estimate_memory("digits", processes=2)           # what it would take, without taking it
    evener.launch(function, processes=4)                    # a function of yours on every rank

    model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)     # a loop that there is
    evener.verify_script("loop.py")                         # the proof for its script

    with evener.Engine(task, batch_size=64) as engine:      # a loop of your own, on each rank
        for batch in engine.batches():
            engine.step(batch)

The public names are those of ``__all__``, and ``evener.print``, which ``from evener import *`` leaves out, for it would
replace Python's. They are imported when first used, so that ``evener --help`` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener import nn
    from evener.attendant import Attendant
    from evener.config import RunConfig
    from evener.data.batch import Batch, MicroBatch
    from evener.engine import Engine
    from evener.errors import EvenerError
    from evener.estimation import MemoryEstimate, estimate_memory
    from evener.fitting import fit
    from evener.losses import Loss, Sum, SumLoss, accuracy, loss
    from evener.observer import Observer
    from evener.prepared.batches import batch
    from evener.prepared.files import load, save
    from evener.prepared.helpers import (
        barrier,
        batch_size,
        device,
        draw,
        gather,
        global_mean,
        is_main,
        no_sync,
        rank,
        world_size,
    )
    from evener.prepared.helpers import print as print
    from evener.prepared.preparing import prepare
    from evener.records import RunSummary
    from evener.running import Trained
    from evener.runtime.launch import launch
    from evener.runtime.rendezvous import Rendezvous
    from evener.runtime.session import Session
    from evener.task import Task, call_model
    from evener.verification import Verification, verify
    from evener.verification.script import ScriptVerification, verify_script

__all__ = [
    "Attendant",
    "Batch",
    "Engine",
    "EvenerError",
    "Loss",
    "MemoryEstimate",
    "MicroBatch",
    "Observer",
    "Rendezvous",
    "RunConfig",
    "RunSummary",
    "ScriptVerification",
    "Session",
    "Sum",
    "SumLoss",
    "Task",
    "Trained",
    "Verification",
    "accuracy",
    "barrier",
    "batch",
    "batch_size",
    "call_model",
    "device",
    "draw",
    "estimate_memory",
    "fit",
    "gather",
    "global_mean",
    "is_main",
    "launch",
    "load",
    "loss",
    "nn",
    "no_sync",
    "prepare",
    "rank",
    "save",
    "verify",
    "verify_script",
    "world_size",
]

_HOMES = {
    "Batch": "data.batch",
    "Engine": "engine",
    "EvenerError": "errors",
    "Loss": "losses",
    "MemoryEstimate": "estimation",
    "MicroBatch": "data.batch",
    "Attendant": "attendant",
    "Observer": "observer",
    "Rendezvous": "runtime.rendezvous",
    "RunConfig": "config",
    "RunSummary": "records",
    "ScriptVerification": "verification.script",
    "Session": "runtime.session",
    "Sum": "losses",
    "SumLoss": "losses",
    "Task": "task",
    "Trained": "running",
    "Verification": "verification",
    "accuracy": "losses",
    "barrier": "prepared.helpers",
    "batch": "prepared.batches",
    "batch_size": "prepared.helpers",
    "call_model": "task",
    "device": "prepared.helpers",
    "draw": "prepared.helpers",
    "estimate_memory": "estimation",
    "fit": "fitting",
    "gather": "prepared.helpers",
    "global_mean": "prepared.helpers",
    "is_main": "prepared.helpers",
    "launch": "runtime.launch",
    "load": "prepared.files",
    "loss": "losses",
    "no_sync": "prepared.helpers",
    "prepare": "prepared.preparing",
    "print": "prepared.helpers",
    "rank": "prepared.helpers",
    "save": "prepared.files",
    "verify": "verification",
    "verify_script": "verification.script",
    "world_size": "prepared.helpers",
}


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("evener.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'evener' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"evener.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
