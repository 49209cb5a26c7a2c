"""The types of numbers that travel between ranks as they are."""

from __future__ import annotations

import torch
from torch import Tensor

KNOWN = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
        *(torch.complex64, torch.complex128),
    )
)
"""The types that gloo and NCCL both send. PyTorch sends complex numbers as pairs."""


def sendable(tensor: Tensor) -> Tensor:
    """Returns a contiguous ``tensor`` as it can be sent and received: itself, or a view of its bytes in one more
    dimension if backends do not know its type, such as int16. Only for messages that add nothing up."""
    return tensor if tensor.dtype in KNOWN else tensor.unsqueeze(-1).view(torch.uint8)
