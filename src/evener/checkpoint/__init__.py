"""What a run can go on from: directories, each whole or absent, that say nothing of how many ranks wrote them.

Tensors go through ``torch.distributed.checkpoint``: every rank writes the pieces that it alone holds, the first rank
what all hold, and a rank that goes on reads what it needs; nobody ever holds the whole of a divided model. All else
lies in one small file::

    checkpoints/
        step-00000120/
            .metadata  __0_0.distcp ...     tensors by name: model/NAME, optimizer/NAME/KEY, random/RANK
            rest.pt                         format, progress, optimizer's groups and other values, balancer, scheduler
            sums.json                       length and checksum of each of these files
        step-00000110/                      the one before, for the case that the latest is damaged
        latest                              "step-00000120"; written last, so that a torn write is never the latest
        best                                likewise, of the best evaluation so far, if one is kept

====================  ===========================================================
:mod:`.folder`        names, pointers, what is kept and what goes
:mod:`.saving`        copies of the state, and the thread that writes them
:mod:`.reading`       what is there, whether it is whole, and a rank's part of it
:mod:`.sums`          checksums
:mod:`.randomness`    the states of random generators as a tensor
:mod:`.digest`        of weights
====================  ===========================================================
"""

from evener.checkpoint.digest import weights_digest
from evener.checkpoint.folder import BEST, FORMAT, LATEST, Keep
from evener.checkpoint.reading import Found, agreed, find
from evener.checkpoint.saving import Saver, Writers

__all__ = [
    "BEST",
    "FORMAT",
    "LATEST",
    "Found",
    "Keep",
    "Saver",
    "Writers",
    "agreed",
    "find",
    "weights_digest",
]
