"""Batches cut along their sequences, and the proof that a model may be given pieces."""

from evener.strategies.context.context import ContextParallel

__all__ = ["ContextParallel"]
