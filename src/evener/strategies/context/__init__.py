"""Context parallelism: batches cut along their sequences, and the check that a model may be given pieces."""

from evener.strategies.context.context import ContextParallel

__all__ = ["ContextParallel"]
