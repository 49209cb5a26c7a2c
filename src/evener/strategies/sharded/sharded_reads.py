"""Explains the error that arises when code outside an FSDP unit reads a weight of the unit, and refuses what code
outside puts in the place of a weight.

Outside its unit the weight is a sharded ``DTensor``, which cannot be combined with a plain tensor. PyTorch's error
names neither the weight nor a remedy; the line of the model's code shows which weight was read.

What is put in the place of a weight would be lost without an error, because FSDP2 gathers its own weights when the unit
is called.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from evener.errors import TaskError
from evener.strategies.sharded.units import Place

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


def refuse_substitutes(name: str, unit: nn.Module, places: Sequence[Place]) -> tuple[RemovableHandle, ...]:
    """Refuses other tensors in the places of a unit's weights when it is called, as ``torch.func.functional_call`` puts
    them there. The hooks that do so are returned."""
    known = {held[key] for held, key, _ in places}
    wrap = "leave the module out of the option 'wrap' (an empty text makes all one unit), or " if name else ""

    def refuse(*_: object) -> None:
        for held, key, weight in places:
            if held[key] not in known:
                raise TaskError(
                    f"{name or 'the model'} is called with another tensor in the place of its weight {weight}, as by "
                    f"torch.func.functional_call, and PyTorch's FSDP2 would compute with the weight itself: {wrap}use "
                    "zero=2 or strategy 'ddp'"
                )

    def note_gathered(*_: object) -> None:
        known.update(held[key] for held, key, _ in places)

    return (
        unit.register_forward_pre_hook(refuse, prepend=True),
        unit.register_forward_pre_hook(note_gathered),
    )
