"""Detects a model that writes to its weights in forward, such as by a clamp, in the first training pass.

On one device the written value stays. Here it would be lost if a rank owns only a part of the weight and has the whole
for the pass alone. If ranks share the memory of a weight, the others would see the write too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.errors import TaskError
from evener.torch_internals.autograd import version


def refuse_writes(
    unit: nn.Module, weights: Callable[[], Iterable[tuple[str, Tensor]]], strategy: str
) -> list[RemovableHandle]:
    """Registers hooks that raise TaskError if ``unit`` writes to its whole weights, until its first training pass is
    over.

    Args:
        weights: Returns names and weights as they are within the pass. To be registered after the hooks that bring
            them.
    """
    before: list[tuple[str, Tensor, int]] = []

    def begin(module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            before[:] = [(name, weight, version(weight)) for name, weight in weights()]

    def end(*_: Any) -> None:
        for name, weight, seen in before:
            if version(weight) != seen:
                raise TaskError(
                    f"the model writes to its weight {name} in forward, and with strategy {strategy!r} a rank has all "
                    "of it for the pass alone: what was written would be lost. Write to weights after an update, by "
                    "the optimizer's register_step_post_hook, or use strategy 'ddp'"
                )
        for hook in hooks if before else ():
            hook.remove()

    hooks = [unit.register_forward_pre_hook(begin), unit.register_forward_hook(end, prepend=True)]
    return hooks
