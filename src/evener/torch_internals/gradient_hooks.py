"""Hooks that run around the accumulation of a gradient: ``Tensor._backward_hooks``, ``..._post_accumulate_grad_hooks``.

They stay with a tensor and cannot be read in a public way, so that whoever puts a piece in the place of a weight would
lose what the user registered, in silence. Nor can they be put off until ranks have summed what they are for.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook`` was called for it."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


Hooks = tuple[Any, Any]
"""Before a gradient is accumulated, and after."""


def hooks_of(tensor: Tensor) -> Hooks | None:
    """Those of ``register_hook`` and of ``register_post_accumulate_grad_hook``; None where there are none."""
    found = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return found if found[0] or found[1] else None


def give_hooks(tensor: Tensor, hooks: Hooks) -> None:
    """Puts ``hooks`` in the place of those that ``tensor`` has; who holds one can still remove it."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
