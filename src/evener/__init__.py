"""Evener: train one PyTorch model on all the devices there are, equal or not, as if they were one device.

::

    import evener

    evener.fit("digits", processes=2)                       # a whole run
    evener.verify("digits", processes=3)                    # the proof that dividing the work changed nothing
    evener.estimate_memory("digits", processes=2)           # what it would take, without taking it
    evener.make_plan("digits", processes=2)                 # how long a step takes, in which way, on how many devices
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

from evener.core.collector import collector_paused

if TYPE_CHECKING:
    from evener import nn
    from evener.core.config.run_config import RunConfig
    from evener.core.losses import Loss, Sum, SumLoss, accuracy, loss
    from evener.core.observer import Observer
    from evener.core.records import RunSummary
    from evener.core.task.average import Average, ema, swa
    from evener.core.task.task import Task, call_model
    from evener.data.batch import Batch, MicroBatch
    from evener.data.sharded import ShardedDataset
    from evener.distributed.launch.launch import launch
    from evener.distributed.launch.rendezvous import Rendezvous
    from evener.distributed.session import Session
    from evener.errors import EvenerError
    from evener.tools.estimate import MemoryEstimate, estimate_memory
    from evener.tools.plan import TrainingPlan, make_plan
    from evener.tools.verify import BitsVerification, Verification, verify, verify_bits
    from evener.tools.verify_script import ScriptVerification, verify_script
    from evener.training.engine import Engine
    from evener.training.fit import fit
    from evener.training.lifecycle.callback import Callback
    from evener.training.prepare.batch import batch
    from evener.training.prepare.checkpoint import load, save
    from evener.training.prepare.helpers import (
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
    from evener.training.prepare.helpers import print as print
    from evener.training.prepare.prepare import prepare
    from evener.training.run import Trained

__all__ = [
    "Average",
    "Batch",
    "BitsVerification",
    "Callback",
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
    "ShardedDataset",
    "Sum",
    "SumLoss",
    "Task",
    "Trained",
    "TrainingPlan",
    "Verification",
    "accuracy",
    "barrier",
    "batch",
    "batch_size",
    "call_model",
    "device",
    "draw",
    "ema",
    "estimate_memory",
    "fit",
    "gather",
    "global_mean",
    "is_main",
    "launch",
    "load",
    "loss",
    "make_plan",
    "nn",
    "no_sync",
    "prepare",
    "rank",
    "save",
    "swa",
    "verify",
    "verify_bits",
    "verify_script",
    "world_size",
]

_HOMES = {
    "Average": "core.task.average",
    "ema": "core.task.average",
    "swa": "core.task.average",
    "Batch": "data.batch",
    "BitsVerification": "tools.verify",
    "Engine": "training.engine",
    "EvenerError": "errors",
    "Loss": "core.losses",
    "MemoryEstimate": "tools.estimate",
    "MicroBatch": "data.batch",
    "ShardedDataset": "data.sharded",
    "Callback": "training.lifecycle.callback",
    "Observer": "core.observer",
    "Rendezvous": "distributed.launch.rendezvous",
    "RunConfig": "core.config.run_config",
    "RunSummary": "core.records",
    "ScriptVerification": "tools.verify_script",
    "Session": "distributed.session",
    "Sum": "core.losses",
    "SumLoss": "core.losses",
    "Task": "core.task.task",
    "Trained": "training.run",
    "TrainingPlan": "tools.plan",
    "Verification": "tools.verify",
    "accuracy": "core.losses",
    "barrier": "training.prepare.helpers",
    "batch": "training.prepare.batch",
    "batch_size": "training.prepare.helpers",
    "call_model": "core.task.task",
    "device": "training.prepare.helpers",
    "draw": "training.prepare.helpers",
    "estimate_memory": "tools.estimate",
    "fit": "training.fit",
    "gather": "training.prepare.helpers",
    "global_mean": "training.prepare.helpers",
    "is_main": "training.prepare.helpers",
    "launch": "distributed.launch.launch",
    "load": "training.prepare.checkpoint",
    "loss": "core.losses",
    "make_plan": "tools.plan",
    "no_sync": "training.prepare.helpers",
    "prepare": "training.prepare.prepare",
    "print": "training.prepare.helpers",
    "rank": "training.prepare.helpers",
    "save": "training.prepare.checkpoint",
    "verify": "tools.verify",
    "verify_bits": "tools.verify",
    "verify_script": "tools.verify_script",
    "world_size": "training.prepare.helpers",
}


def __getattr__(name: str) -> Any:
    if name != "nn" and name not in _HOMES:
        raise AttributeError(f"module 'evener' has no attribute {name!r}")
    with collector_paused():
        module = importlib.import_module(f"evener.{_HOMES.get(name, name)}")
    value = module if name == "nn" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
