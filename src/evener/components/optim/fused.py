"""Fused updates: uses PyTorch's fused kernel for Adam, if it is available and the task has chosen nothing else.

By default PyTorch updates parameters on a CPU one after the other with a dozen operators each, and each operator reads
and writes memory. The fused kernel does so once. It rounds differently, so that the bits of a run differ from those of
a run without it. They do not depend on the number of threads.

The kernel treats parameter, gradient and state as flat arrays and ignores strides. A gradient with other strides than
its parameter would be added to the wrong weights, without an error. So only contiguous parameters are fused, and a
gradient that is not contiguous (hooks may return one) is copied first. State that is loaded is laid out as its
parameter, which a task that fuses by itself may have in another order (channels_last): files hold contiguous tensors.
State of another shape is refused. The kernel would read and write beyond it.

SGD and Adagrad are not changed: their update takes one or two operators, and their kernels refuse sparse gradients,
which cannot be foreseen.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.sharded_tensor.local import local
from evener.errors import ConfigurationError
from evener.torch_internals.dispatch import is_fake

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
"""Exactly these classes are fused: a subclass may step in its own way."""
_TYPES = (torch.float32, torch.float64)
"""Types that are fused. In half precision, the kernel's results differ from the operators' by more than an ulp."""
_CHOICES = ("fused", "foreach", "differentiable", "capturable")
_FLAT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
"""State that PyTorch's fused kernels take as flat arrays."""


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Sets ``fused`` for those groups of ``optimizer`` that can be fused and whose task has chosen no
    implementation."""
    if type(optimizer) not in _KINDS:
        return
    offered: dict[tuple[torch.device, torch.dtype], bool] = {}
    for group in optimizer.param_groups:
        kinds = {(p.device, p.dtype): p for p in group["params"]}
        if _is_open(group) and all(map(_is_plain, group["params"])):
            offered |= {kind: _is_offered(optimizer, p) for kind, p in kinds.items() if kind not in offered}
            group["fused"] = True if kinds and all(offered[kind] for kind in kinds) else None


def _is_open(group: dict[str, Any]) -> bool:
    """Returns True if the task has chosen no implementation for the group, and none of its options is a tensor."""
    return not any(group.get(name) for name in _CHOICES) and not (
        group.get("foreach") is False
        or group.get("fused") is False
        or any(isinstance(value, Tensor) for value in group.values())
    )


def _is_plain(parameter: Tensor) -> bool:
    ordinary = type(parameter) in (Tensor, nn.Parameter) or is_fake(parameter)
    return ordinary and parameter.dtype in _TYPES and parameter.is_contiguous()


def _is_offered(optimizer: torch.optim.Optimizer, like: Tensor) -> bool:
    """Returns True if PyTorch has the kernel for this device and type. Tries a step of one number."""
    number = like.detach().new_zeros(1).requires_grad_()
    number.grad = torch.zeros_like(number)
    try:
        made: Any = type(optimizer)
        made([number], fused=True).step()
    except (RuntimeError, AssertionError):  # NotImplementedError is one of the first
        return False
    return True


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Makes the gradients of fused parameters contiguous before a step."""
    for group in optimizer.param_groups:
        if group.get("fused") and not _all_contiguous(group["params"]):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided or gradient.is_contiguous():
                    continue
                if parameter.is_contiguous():
                    parameter.grad = gradient.contiguous()


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Lays out the state of fused parameters as these are. Must follow each loading of a state.

    Raises:
        ConfigurationError: If it has another shape. The optimizer has no state then.
    """
    fused = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
    for parameter in fused:
        state = optimizer.state.get(parameter, {})
        for key in [key for key in _FLAT if isinstance(state.get(key), Tensor)]:
            own, like = local(state[key]), local(parameter)
            if own.shape != like.shape:
                optimizer.state.clear()
                raise ConfigurationError(
                    f"the optimizer's state is of another model: {key} has the shape {tuple(own.shape)} there, and its "
                    f"parameter {tuple(like.shape)} here"
                )
            if own.stride() != like.stride():
                state[key] = torch.empty_like(parameter, requires_grad=False).copy_(state[key])


def _all_contiguous(parameters: Iterable[Tensor]) -> bool:
    """Returns True if all have a contiguous gradient. Nothing is done in Python for each parameter."""
    try:
        return all(map(Tensor.is_contiguous, map(attrgetter("grad"), parameters)))
    except (TypeError, RuntimeError):  # a gradient is missing, or sparse
        return False


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sets the gradients of the optimizer's parameters to None: what ``zero_grad()`` does, of which PyTorch's own makes
    a range for the profiler and passes through the guard of torch.compile, about 25 microseconds a step."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def words_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns a text for the record that tells which groups are fused; "" if none are."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    fused = sum(bool(group.get("fused")) for group in groups)
    if not fused:
        return ""
    how_many = "" if fused == len(groups) else f" in {fused} of {len(groups)} groups"
    return f"optimizer {type(optimizer).__name__}, fused{how_many}"
