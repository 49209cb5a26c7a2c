"""What memory a rank's tensors take: counted as operators make and free them, by what they are for.

==============  ==========================================================================
``tally``       sums and their peak, and what the peak was made of; knows nothing of torch
``purpose``     by which whoever makes memory says what it is for
``accounting``  tells the tally of every storage that operators make, and holds to a limit
==============  ==========================================================================

One mechanism serves three: it watches real tensors, it limits what they may take, and on tensors without numbers it
estimates a run before there is one.
"""

from evener.hardware.memory.counters import CATEGORIES
from evener.hardware.memory.purpose import made_as
from evener.hardware.memory.tracker import Accounting, MemoryLimitError

__all__ = ["CATEGORIES", "Accounting", "MemoryLimitError", "made_as"]
