"""Copies from a device to the host, of which the host has to wait for each: nothing keeps it from reading before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU, DEVICE = torch.device("cpu"), torch.device("meta")


class CopiesToHost(TorchFunctionMode):
    """Sees copies from the meta device, which stands for a GPU, and gives the host zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []
        """Whether the host waits, for each copy to it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.to, Tensor.copy_):
            source, target = (args[0], args[1]) if func is Tensor.to else (args[1], args[0].device)
            if isinstance(target, torch.device) and source.is_meta and target.type == "cpu":
                self.waits.append(not given.get("non_blocking", False))
                return torch.zeros(source.shape, dtype=source.dtype) if func is Tensor.to else args[0]
        return func(*args, **given)
