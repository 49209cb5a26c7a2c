"""How often a tensor was written to in place: ``Tensor._version``.

Autograd counts it to find tensors that were changed since they were saved; its notes name the attribute, and no
public one tells it.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import Tensor


def version(tensor: Tensor) -> int:
    """Rises with every write."""
    return tensor._version
