"""Whether somebody has put hooks on the steps of an optimizer, which has a public way to put and none to see them.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import torch


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Before or after a step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
