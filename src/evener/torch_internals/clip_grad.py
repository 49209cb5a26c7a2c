"""The private function with which ``torch.nn.utils.clip_grad_norm_`` takes the norm of all gradients together.

``_get_total_norm`` is public as ``torch.nn.utils.get_total_norm``, but ``clip_grad_norm_`` calls it by its private
name. It is replaced while gradients are parts of what one device would have. To replace ``clip_grad_norm_`` itself
would not reach a loop that has imported it before.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.nn import utils
from torch.nn.utils import clip_grad

TotalNorm = Callable[..., Any]
"""Takes gradients, the order of the norm, ``error_if_nonfinite`` and ``foreach``."""


def replace_total_norm(made: Callable[[TotalNorm], TotalNorm]) -> Callable[[], None]:
    """Replaces the function by what ``made`` returns for it. Returns a function that restores it."""
    total_norm = made(clip_grad._get_total_norm)
    patches = [
        mock.patch.object(clip_grad, "_get_total_norm", total_norm),
        mock.patch.object(utils, "get_total_norm", total_norm),
    ]
    for patch in patches:
        patch.start()

    def restore() -> None:
        while patches:
            patches.pop().stop()

    return restore
