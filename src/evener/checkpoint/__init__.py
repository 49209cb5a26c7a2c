"""What a run can go on from: directories, each whole or absent, that say nothing of how many ranks wrote them.

Tensors go through ``torch.distributed.checkpoint``: every rank writes the pieces that it alone holds, the first rank
what all hold, and a rank that goes on reads what it needs; nobody ever holds the whole of a divided model. All else
lies in one small file::

    checkpoints/
        step-00000120/
            __0_0.distcp ...                tensors by name: model/NAME, optimizer/NAME/KEY, random/RANK
            tensors.json                    their types and shapes, and in which file each piece lies
            .metadata                       the same as a pickle, for PyTorch's own tools
            rest.pt                         format, progress, optimizer's groups and other values, balancer, scheduler
            evener.json                     the mark: Evener wrote this, which run it is of
            evaluation.json                 what is remembered after the evaluation of these weights
            sums.json                       length and checksum of each of these files
        step-00000110/                      the one before, for the case that the latest is damaged
        latest                              "step-00000120"; written last, so that a torn write is never the latest
        best                                likewise, of the best evaluation so far, if one is kept

====================  ===========================================================
:mod:`.run_mark`      marks, and the run that a checkpoint is of
:mod:`.layout`        names, pointers, what is kept and what goes
:mod:`.evaluation`    what an evaluation adds: what is remembered after it, and the best
:mod:`.writer`        copies of the state, and the thread that writes them
:mod:`.reader`        what is there, whether it is whole, and a rank's part of it
:mod:`.structure`     of what form the parts are that are no tensors
:mod:`.checksums`     checksums
:mod:`.tensor_index`  which tensors there are, and where
:mod:`.inert_pickle`  the same of earlier versions, out of PyTorch's pickle
:mod:`.rng_state`     the states of random generators as a tensor
:mod:`.digest`        of weights
====================  ===========================================================
"""

from evener.checkpoint.digest import weights_digest
from evener.checkpoint.layout import BEST, FORMAT, LATEST, Keep
from evener.checkpoint.reader import Found, agreed, find
from evener.checkpoint.writer import Saver, Writers

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
