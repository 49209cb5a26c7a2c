"""Explains the errors that arise when a weight of an FSDP unit is read where it is not whole.

Outside its unit the weight is a sharded ``DTensor``, which cannot be combined with a plain tensor. PyTorch's error
names neither the weight nor a remedy; the line of the model's code shows which weight was read. A graph of gradients,
which the loop took itself, reads whole weights whose memory FSDP2 has freed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from evener.errors import TaskError

_MIXED, _FREED = "mixed torch.Tensor and DTensor", "for storage of size 0"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SHOWN = 4


@contextmanager
def reads_explained(units: Iterable[str]) -> Iterator[None]:
    """Turns PyTorch's errors about such reads into one that shows the line of code and the remedy.

    Args:
        units: Names of the units; the model itself has an empty name.

    Raises:
        TaskError: If code in the block combines a sharded weight with a plain tensor, or goes backward through one
            that was freed.
    """
    try:
        yield
    except RuntimeError as error:
        if _FREED in str(error):
            raise TaskError(
                "backward went through gradients that torch.autograd.grad(..., create_graph=True) took outside of the "
                "model's forward, to weights that were whole there and are divided since: take them in the forward, "
                "and return them or their penalty as outputs, or use zero=1 or strategy 'ddp'"
            ) from error
        if _MIXED not in str(error):
            raise
        frames = [
            each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_TORCH)
        ]
        place = frames[-1]
        names = [name for name in units if name]
        shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
        raise TaskError(
            f"{place.name}, line {place.lineno} of {os.path.basename(place.filename)}, computes with the weight of a "
            f"unit outside of that unit's forward, where each rank has a part of it: {place.line}. The units are "
            f"{shown}; whose weights others read can be none: name the others in the option 'wrap' (an empty text "
            "makes all one unit), or use zero=2 or strategy 'ddp'"
        ) from error
