"""Names of optimizers: hooks on a step, and norms of many gradients.

- ``Optimizer._optimizer_step_pre_hooks`` and ``..._post_hooks`` say whether hooks were registered, which cannot be
  asked in a public way. Whoever steps in an optimizer's place would lose them in silence.
- ``torch._foreach_norm`` finds the largest number of each of many tensors in one go. ``torch.linalg.vector_norm`` takes
  one tensor, and a GPU's host is busy for as long with starting it as with starting the norm of a hundred.
  ``torch.nn.utils.get_total_norm`` starts them together, but gives the norm of all.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Tells whether something was registered to be called before or after the optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the largest absolute value of each tensor, none of which is empty; NaN for one that holds a NaN."""
    return list(torch._foreach_norm(list(tensors), math.inf))
