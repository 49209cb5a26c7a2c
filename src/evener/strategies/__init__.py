"""Evener's strategies, and what one of your own is made of: docs/strategies.md, :mod:`evener.strategies.base`."""

from evener.hardware.readout import read
from evener.hardware.stopwatch import waiting
from evener.runtime.mesh import Layout, Mesh
from evener.strategies.base import Strategy
from evener.strategies.context import ContextParallel
from evener.strategies.data_parallel import DataParallel
from evener.strategies.ddp import Ddp
from evener.strategies.experts import ExpertParallel
from evener.strategies.features import FeatureParallel
from evener.strategies.layers import Layers
from evener.strategies.learner import Learner
from evener.strategies.normalize import normalize_together
from evener.strategies.parts import Cut, Settings, StepOutcome, Stepper, Synchronizer
from evener.strategies.pipeline import Pipeline
from evener.strategies.plain import Plain
from evener.strategies.sharded import Sharded
from evener.strategies.slices import Slice, mark
from evener.strategies.tensor import TensorParallel

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
