"""A weight of a unit that code outside of it reads: there it is a divided ``DTensor``, which meets no plain tensor.

The error of PyTorch says neither whose weight it is nor what to do; the line of the model's code says the first.
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
    """In the block such a read is an error with the line of code and the way out.

    Args:
        units: By name; the model itself has an empty one.

    Raises:
        TaskError: If a divided weight meets a plain tensor.
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
