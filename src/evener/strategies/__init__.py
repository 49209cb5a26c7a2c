"""Evener's strategies, and what one of your own is made of: docs/strategies.md, :mod:`evener.strategies.base`."""

from evener.components.sharded_tensor.shard_spec import Slice, mark
from evener.distributed.mesh import Layout, Mesh
from evener.hardware.async_read import read
from evener.hardware.timers import waiting
from evener.strategies.base import Strategy
from evener.strategies.context.context import ContextParallel
from evener.strategies.ddp import Ddp
from evener.strategies.experts import ExpertParallel
from evener.strategies.features import FeatureParallel
from evener.strategies.interfaces import Cut, Settings, StepOutcome, Stepper, Synchronizer
from evener.strategies.learner import Learner
from evener.strategies.pipeline.pipeline import Pipeline
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.single_process.data_parallel import DataParallel
from evener.strategies.single_process.model_parallel import Layers
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.tensor.tensor import TensorParallel

__all__ = [
    "ContextParallel",
    "Cut",
    "DataParallel",
    "Ddp",
    "ExpertParallel",
    "FeatureParallel",
    "Layers",
    "Layout",
    "Learner",
    "Mesh",
    "Pipeline",
    "Plain",
    "Settings",
    "Sharded",
    "Slice",
    "StepOutcome",
    "Stepper",
    "Strategy",
    "Synchronizer",
    "TensorParallel",
    "mark",
    "normalize_together",
    "read",
    "waiting",
]
