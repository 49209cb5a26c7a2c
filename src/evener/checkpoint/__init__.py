"""Checkpoints: directories from which a run resumes. Each is whole or absent, and works for any number of ranks.

Tensors are stored by ``torch.distributed.checkpoint``: every rank writes the pieces that it alone holds, and the first
rank writes what all hold. A resuming rank reads what it needs. So no rank ever holds the whole of a sharded model.
Everything else is in one small file::

    checkpoints/
        step-00000120/
            __0_0.distcp ...                tensors by name: model/NAME, optimizer/NAME/KEY, random/RANK
            tensors.json                    their types and shapes, and in which file each piece lies
            .metadata                       the same as a pickle, for PyTorch's own tools
            rest.pt                         format, progress, optimizer's groups and other values, balancer, scheduler
            evener.json                     the mark: Evener wrote this, which run it is of
            evaluation.json                 what is remembered after the evaluation of these weights
            sums.json                       length and checksum of each of these files
        step-00000110/                      the one before, in case the latest is damaged
        latest                              "step-00000120"; written last, so that a torn write is never the latest
        best                                the same for the best evaluation so far, if one is kept

====================  ===========================================================
:mod:`.run_mark`      marks, and the run that a checkpoint belongs to
:mod:`.layout`        names, pointers, and which checkpoints are kept
:mod:`.evaluation`    state after an evaluation, and the best checkpoint
:mod:`.writer`        copies of the state, and the thread that writes them
:mod:`.reader`        finds whole checkpoints, and reads a rank's part of one
:mod:`.structure`     checks the parts that are not tensors
:mod:`.checksums`     checksums
:mod:`.tensor_index`  names, types, shapes and places of the tensors
:mod:`.rng_state`     the states of random generators as a tensor
:mod:`.digest`        digest of weights
:mod:`.archive`       looks at archives before they are read
:mod:`.outputs`       keeps what other commands write out of all this
====================  ===========================================================

The names below are imported when they are first used, because PyTorch's checkpoints take over a second to import. The
process that starts the ranks, and most commands, need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener.checkpoint.digest import weights_digest
    from evener.checkpoint.layout import BEST, FORMAT, LATEST, Keep
    from evener.checkpoint.reader import StoredCheckpoint, agreed, find
    from evener.checkpoint.writer import Saver, Writers

__all__ = [
    "BEST",
    "FORMAT",
    "LATEST",
    "Keep",
    "Saver",
    "StoredCheckpoint",
    "Writers",
    "agreed",
    "find",
    "weights_digest",
]

_HOMES = {
    **dict.fromkeys(("BEST", "FORMAT", "LATEST", "Keep"), "layout"),
    **dict.fromkeys(("StoredCheckpoint", "agreed", "find"), "reader"),
    **dict.fromkeys(("Saver", "Writers"), "writer"),
    "weights_digest": "digest",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'evener.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"evener.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
