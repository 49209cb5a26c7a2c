"""How the strategy tensor divides a model: the plan, regions of layers, and streams of positions."""

from evener.strategies.tensor.tensor import TensorParallel, plan_of

__all__ = ["TensorParallel", "plan_of"]
