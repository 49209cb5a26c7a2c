"""A module's own parameters and buffers, to be replaced in place: ``_parameters`` and ``_buffers``.

``named_parameters`` leaves out those that are None, and ``setattr`` goes through ``__setattr__`` of a module that may
have its own (lazy and parametrized ones do).

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import Tensor, nn


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """By name; writing to it replaces them."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """By name; writing to it replaces them."""
    return module._buffers
