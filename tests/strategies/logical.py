"""A CPU that is as strict about its logical devices as PyTorch is about GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


class MixedDevicesError(AssertionError):
    """One operation got tensors of two devices."""


class LogicalDevices(TorchDispatchMode):
    """While it is entered, every tensor has a logical device: weights that of their module, results that of what they
    were made of, copies where they went to, and all else that of ``home``.

    For forward passes: the gradient of a copy to ``cpu:1`` is on the CPU already, and autograd does not copy it back.
    """

    def __init__(self, model: nn.Module, places: Mapping[str, torch.device], home: str = "cpu:0") -> None:
        super().__init__()
        self._home, self._devices = torch.device(home), WeakTensorKeyDictionary()
        for name, device in places.items():
            module = model.get_submodule(name)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._devices[tensor] = device

    def of(self, tensor: Tensor) -> torch.device:
        found: torch.device = self._devices.get(tensor, self._home)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {self.of(tensor) for tensor in given}
        found = func(*args, **kwargs)
        target = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and target is not None:
            devices = {target}
        if len(devices) > 1:
            raise MixedDevicesError(f"{func} of tensors on {sorted(map(str, devices))}")
        for made in tree_leaves(found):
            if isinstance(made, Tensor) and devices:
                self._devices[made] = next(iter(devices))
        return found
