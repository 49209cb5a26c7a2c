"""Strategies for several devices in one process: data parallelism with replicas, and a model divided by layers."""

from evener.strategies.single_process.data_parallel import DataParallel
from evener.strategies.single_process.model_parallel import Layers, moves_of, placement_of

__all__ = ["DataParallel", "Layers", "moves_of", "placement_of"]
