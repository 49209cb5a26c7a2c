"""The built-in strategies and the base classes for writing one: see docs/strategies.md and
:mod:`evener.strategies.base`."""

from evener.components.sharded_tensor.shard_spec import ShardSpec, set_shard_spec
from evener.distributed.mesh import Layout, Mesh
from evener.hardware.async_read import read
from evener.hardware.timers import waiting
from evener.strategies.asynchronous.strategies import Asynchronous
from evener.strategies.base import Strategy
from evener.strategies.context.context import ContextParallel
from evener.strategies.ddp import Ddp
from evener.strategies.experts import ExpertParallel
from evener.strategies.features import FeatureParallel
from evener.strategies.interfaces import BatchSlicer, StepOutcome, Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.local_steps.strategies import DiLoCo, LocalSgd
from evener.strategies.pipeline.pipeline import Pipeline
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.single_process.data_parallel import DataParallel
from evener.strategies.single_process.model_parallel import Layers
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer, SynchronizerAround
from evener.strategies.tensor.tensor import TensorParallel

__all__ = [
    "Asynchronous",
    "BatchSlicer",
    "ContextParallel",
    "DataParallel",
    "Ddp",
    "DiLoCo",
    "ExpertParallel",
    "FeatureParallel",
    "Layers",
    "Layout",
    "Learner",
    "LocalSgd",
    "Mesh",
    "Pipeline",
    "Plain",
    "ShardSpec",
    "Sharded",
    "StepOutcome",
    "Stepper",
    "Strategy",
    "StrategySettings",
    "Synchronizer",
    "SynchronizerAround",
    "TensorParallel",
    "normalize_together",
    "read",
    "set_shard_spec",
    "waiting",
]
