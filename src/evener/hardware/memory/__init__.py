"""Counts the memory of a rank's tensors by category, when operators allocate and free them.

============  =========================================================================
``counters``  sums, their peak, and the peak's parts; independent of torch
``purpose``   lets code that allocates memory state its category
``tracker``   counts every storage that operators allocate, and enforces a limit
============  =========================================================================

The same tracker measures the memory of real tensors, enforces a memory limit, and estimates a run's memory with fake
tensors before the run.
"""

from evener.hardware.memory.counters import CATEGORIES
from evener.hardware.memory.purpose import made_as
from evener.hardware.memory.tracker import MemoryLimitError, MemoryTracker

__all__ = ["CATEGORIES", "MemoryLimitError", "MemoryTracker", "made_as"]
