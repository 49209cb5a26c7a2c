"""A model in stages: read as a graph, cut at module names, its stages run over ranks by a schedule."""

from evener.strategies.pipeline.pipeline import Pipeline, draw

__all__ = ["Pipeline", "draw"]
