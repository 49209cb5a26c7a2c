"""Streams beside those of the callers."""

from __future__ import annotations

import torch
from torch import Tensor


class Streams:
    """One of its own for each GPU."""

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.cuda.Stream] = {}

    def behind(self, tensor: Tensor) -> torch.cuda.Stream:
        """That of the tensor's device; it begins when the current one has come this far, and may use the tensor."""
        device = tensor.device
        if device not in self._made:
            self._made[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._made[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        tensor.record_stream(stream)
        return stream
