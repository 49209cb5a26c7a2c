"""Marks of gradients: whether one is of all ranks, or this rank's part of the sum. One that a loop has set has none."""

from __future__ import annotations

import torch
from torch import nn

MARK = "evener_gradient"
"""The attribute of the gradient."""
WHOLE, PART = "whole", "part"


def set_mark(parameter: nn.Parameter, mark: str) -> None:
    """Marks the gradient of ``parameter``, if it has one."""
    if parameter.grad is not None:
        setattr(parameter.grad, MARK, mark)


def mark_of(parameter: nn.Parameter) -> str | None:
    """Returns the mark of the gradient of ``parameter``."""
    return getattr(parameter.grad, MARK, None)


def become_part(parameter: nn.Parameter, ranks: int) -> None:
    """Makes a whole gradient this rank's part of a sum over ``ranks`` ranks."""
    if mark_of(parameter) != PART and parameter.grad is not None:
        with torch.no_grad():
            parameter.grad.mul_(1 / ranks)
        set_mark(parameter, PART)


def become_whole(parameter: nn.Parameter, ranks: int) -> None:
    """Undoes :func:`become_part` for a gradient to which no rank has added."""
    if mark_of(parameter) == PART and parameter.grad is not None:
        with torch.no_grad():
            parameter.grad.mul_(ranks)
        set_mark(parameter, WHOLE)
