"""What a strategy of your own is made of; see docs/strategies.md, and :mod:`evener.strategies.base`."""

from evener.hardware.readout import read
from evener.hardware.stopwatch import waiting
from evener.runtime.mesh import Layout, Mesh
from evener.strategies.base import Strategy
from evener.strategies.context import ContextParallel
from evener.strategies.ddp import Ddp
from evener.strategies.learner import Learner
from evener.strategies.normalize import normalize_together
from evener.strategies.parts import Cut, Settings, StepOutcome, Stepper, Synchronizer
from evener.strategies.plain import Plain
from evener.strategies.slices import Slice, mark

__all__ = [
    "ContextParallel",
    "Cut",
    "Ddp",
    "Layout",
    "Learner",
    "Mesh",
    "Plain",
    "Settings",
    "Slice",
    "StepOutcome",
    "Stepper",
    "Strategy",
    "Synchronizer",
    "mark",
    "normalize_together",
    "read",
    "waiting",
]
