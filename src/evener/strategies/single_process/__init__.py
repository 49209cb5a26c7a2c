"""What several devices of one process need: copies, threads, and what crosses borders."""

from evener.strategies.single_process.data_parallel import DataParallel
from evener.strategies.single_process.model_parallel import Layers, moves_of, placement_of

__all__ = ["DataParallel", "Layers", "moves_of", "placement_of"]
