"""Hooks that run when a gradient has been accumulated: ``Tensor._post_accumulate_grad_hooks``.

They stay with a tensor and cannot be read in a public way, so that whoever puts a piece in the place of a weight would
lose what the user registered, in silence.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import Tensor


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook`` was called for it."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
