"""Explains the error that arises when code outside an FSDP unit reads a weight of the unit.

Outside its unit the weight is a sharded ``DTensor``, which cannot be combined with a plain tensor. PyTorch's error
names neither the weight nor a remedy; the line of the model's code shows which weight was read.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from evener.errors import TaskError

_MIXED = "mixed torch.Tensor and DTensor"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SHOWN = 4


@contextmanager
def reads_explained(units: Iterable[str]) -> Iterator[None]:
    """Turns PyTorch's error about such a read into one that shows the line of code and the remedy.

    Args:
        units: Names of the units; the model itself has an empty name.

    Raises:
        TaskError: If code in the block combines a sharded weight with a plain tensor.
    """
    try:
        yield
    except RuntimeError as error:
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
