"""Fused updates: one kernel for an update of Adam's, where PyTorch has it and nobody has chosen otherwise.

By itself PyTorch updates parameters on a CPU one after the other, by a dozen operators each, and every one of them goes
through memory. Its fused kernel goes once. It rounds elsewhere, so that a run with it has other bits than one without,
and the same whatever number of threads computes it.

The kernel takes parameter, gradient and state as rows of numbers and does not look at strides: what is laid out in
another way than its parameter would be added to the wrong weights, and no error says so. So only contiguous parameters
are updated by it, and a gradient that is not contiguous, as a hook may leave it, is copied first.

SGD and Adagrad are left as they are made: their update is one or two operators, and their kernels refuse sparse
gradients, which nobody can see before they come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evener.torch_internals.fake_tensors import is_fake

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
"""These classes themselves: one that derives from them may step in its own way."""
_TYPES = (torch.float32, torch.float64)
"""In half precision the kernel's numbers are not those of the operators up to an ulp."""
_CHOICES = ("fused", "foreach", "differentiable", "capturable")


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Has the groups of ``optimizer`` fused that can be, and of which its maker has said nothing."""
    if type(optimizer) not in _KINDS:
        return
    offered: dict[tuple[torch.device, torch.dtype], bool] = {}
    for group in optimizer.param_groups:
        kinds = {(p.device, p.dtype): p for p in group["params"]}
        if _is_open(group) and all(map(_is_plain, group["params"])):
            offered |= {kind: _is_offered(optimizer, p) for kind, p in kinds.items() if kind not in offered}
            group["fused"] = True if kinds and all(offered[kind] for kind in kinds) else None


def _is_open(group: dict[str, Any]) -> bool:
    """A rate or another option that is a tensor is left to what its maker has tried."""
    return not any(group.get(name) for name in _CHOICES) and not (
        group.get("foreach") is False
        or group.get("fused") is False
        or any(isinstance(value, Tensor) for value in group.values())
    )


def _is_plain(parameter: Tensor) -> bool:
    ordinary = type(parameter) in (Tensor, nn.Parameter) or is_fake(parameter)
    return ordinary and parameter.dtype in _TYPES and parameter.is_contiguous()


def _is_offered(optimizer: torch.optim.Optimizer, like: Tensor) -> bool:
    """Whether PyTorch has the kernel for the device: asked by a step of one number."""
    number = like.detach().new_zeros(1).requires_grad_()
    number.grad = torch.zeros_like(number)
    try:
        made: Any = type(optimizer)
        made([number], fused=True).step()
    except (RuntimeError, AssertionError):  # NotImplementedError is one of the first
        return False
    return True


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Before a step: the gradients of what is fused are made contiguous where their parameters are."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or gradient.is_contiguous():
                continue
            if parameter.is_contiguous():
                parameter.grad = gradient.contiguous()


def words_of(optimizer: torch.optim.Optimizer) -> str:
    """For the record; empty for an optimizer of which nothing is fused."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    fused = sum(bool(group.get("fused")) for group in groups)
    if not fused:
        return ""
    how_many = "" if fused == len(groups) else f" in {fused} of {len(groups)} groups"
    return f"optimizer {type(optimizer).__name__}, fused{how_many}"
