"""Pipeline parallelism: reads the model as a graph, cuts it at module names, and runs the stages by a schedule."""

from evener.strategies.pipeline.pipeline import Pipeline, draw

__all__ = ["Pipeline", "draw"]
