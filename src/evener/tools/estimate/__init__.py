"""Estimates the memory of a run before it starts: takes the engine's own steps as each rank in turn, on fake tensors.

====================  ========================================================================
``estimate``          the estimate of all ranks, one after the other
``rank``              the estimate of one rank
``fake_models``       builds a model of fake tensors
``fake_values``       answers when code asks for the value of a fake tensor
``fake_world``        stands in for the other ranks
``fake_p2p``          stands in for the messages between pipeline stages
``onednn_workspace``  the workspace that oneDNN keeps for recurrent layers
``steps``             the steps that are counted, for estimates and measurements alike
``measure``           measures the same steps in a real run, to compare with the estimate
``result``            the record
``unknown``           why memory cannot be known before a run
====================  ========================================================================
"""

from evener.tools.estimate.estimate import estimate_memory
from evener.tools.estimate.result import MemoryEstimate, RankMemory
from evener.tools.estimate.unknown import UnknownMemoryError

__all__ = ["MemoryEstimate", "RankMemory", "UnknownMemoryError", "estimate_memory"]
