"""The classes from which torch's BatchNorms and Dropouts derive: ``_BatchNorm`` and ``_DropoutNd``.

A model may hold any of them, also of classes that the user derived, and there is no public class that they have in
common.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout

__all__ = ["AnyBatchNorm", "AnyDropout"]
