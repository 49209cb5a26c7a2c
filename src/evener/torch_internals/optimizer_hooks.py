"""Whether hooks are registered on an optimizer's step: ``Optimizer._optimizer_step_pre_hooks`` and ``..._post_hooks``.

There is no public way to ask whether hooks were registered, and whoever steps in an optimizer's place would lose them
in silence.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch.optim import Optimizer


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether something was registered to be called before or after its step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
