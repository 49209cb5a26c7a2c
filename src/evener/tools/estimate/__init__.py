"""Memory before the run: the engine's own steps, taken as each rank in turn on tensors that have no memory.

============  ================================================================================
``estimate``  all ranks of a run, one after the other
``rank``      one rank: fake tensors, what answers for them, and the accounting above
``models``    a model of fake tensors
``answers``   what happens where a number is asked of a tensor that has none
``world``     the other ranks, which are not there
``post``      what stages of a pipeline send each other, by its form
``steps``     the steps that are counted, in an estimate as in a run that is measured
``result``    the record
============  ================================================================================
"""

from evener.tools.estimate.estimate import estimate_memory
from evener.tools.estimate.result import MemoryEstimate, RankMemory

__all__ = ["MemoryEstimate", "RankMemory", "estimate_memory"]
