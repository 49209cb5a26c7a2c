"""CUDA streams for work beside the caller's streams."""

from __future__ import annotations

import torch
from torch import Tensor


class Streams:
    """Holds one stream for each GPU."""

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.cuda.Stream] = {}

    def behind(self, tensor: Tensor) -> torch.cuda.Stream:
        """Returns the stream of the tensor's device, after it was made to wait for the current stream and the tensor
        was recorded on it."""
        device = tensor.device
        if device not in self._made:
            self._made[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._made[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        tensor.record_stream(stream)
        return stream
