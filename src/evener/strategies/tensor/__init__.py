"""Tensor parallelism: the plan that divides a model, regions of layers, and sequence parallelism beside them."""

from evener.strategies.tensor.tensor import TensorParallel, plan_of

__all__ = ["TensorParallel", "plan_of"]
