"""Finds what a CUDA graph would leave out or freeze, in a pass that runs operator by operator.

A graph repeats kernels with the addresses and the Python numbers of its recording. :class:`OperatorWatch` refuses
operators for which that is not the same computation, before they run: so a pass that communicates has sent nothing yet.
:class:`ScopeWatch` refuses layers that ask which samples they compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.reached_parameters import nodes_behind
from evener.data.batch import tensors_in
from evener.nn.context import Scope
from evener.nn.fqn import clean_name
from evener.torch_internals.dispatch import READS_NUMBER, DispatchMode, written
from evener.torch_internals.modules import has_hooks

_OF_RANKS = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
"""Namespaces of operators that communicate."""
_OF_SAMPLES = frozenset(("samples", "step", "keys", "call", "order", "follow", "group"))
"""What a scope knows of the single batch, and the group in which ranks compute it."""


class UnfitError(Exception):
    """A pass cannot be recorded; the message says why."""


class ScopeWatch(Scope):
    """A scope that refuses to say which samples are computed, and by which ranks."""

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_SAMPLES:
            raise UnfitError(
                "a layer or the loss asks Evener for the samples, the step or the ranks of the batch, as evener.nn's "
                "Dropout does, and a graph would keep the answer"
            )
        return super().__getattribute__(name)


class OperatorWatch(DispatchMode):
    """Refuses operators that a graph cannot repeat.

    Args:
        device: The device whose operators are recorded.
        kept: Names of the tensors that the model keeps and no pass may write, by the address of their memory.
    """

    def __init__(self, device: torch.device, kept: Mapping[int, str]) -> None:
        super().__init__()
        self._device, self._kept = device, kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if why := self._reason(func, args, given):
            raise UnfitError(f"{why} ({func})")
        result = func(*args, **given)
        if self._is_on_host(result):
            raise UnfitError(f"forward or backward makes a tensor in the host's memory ({func})")
        return result

    def _reason(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        if function.namespace in _OF_RANKS:
            return "forward or backward communicates with other ranks"
        if function is READS_NUMBER or torch.Tag.dynamic_output_shape in function.tags:
            return "the host waits for a number of the device in forward or backward"
        if self._is_on_host((args, kwargs)):
            return "forward or backward reads a tensor in the host's memory, whose numbers a graph would keep"
        into = [each for each in written(function, args, kwargs) if isinstance(each, Tensor)]
        names = [self._kept.get(each.untyped_storage().data_ptr(), "") for each in into]
        return next(
            (f"forward or backward writes in place to {name}, no buffer" for name in names if name), ""
        )

    def _is_on_host(self, tree: Any) -> bool:
        """Returns True if a tensor is on the host. If the device is the host, nothing tells."""
        return self._device.type != "cpu" and any(each.device.type == "cpu" for each in tensors_in(tree))


def leaves_of(total: Tensor) -> set[Tensor]:
    """Returns the tensors whose gradients backward from ``total`` would accumulate."""
    leaves = (getattr(node, "variable", None) for node in nodes_behind(total))
    return {leaf for leaf in leaves if isinstance(leaf, Tensor)}


def hooked_module(model: nn.Module) -> str:
    """Returns the name of a module with hooks on its calls or their gradients; "" if there is none."""
    return next(
        (clean_name(name) or "the model" for name, each in model.named_modules() if has_hooks(each)), ""
    )
