"""Hooks that a model's constructor has registered on its parameters, where pieces take the place of these."""

from __future__ import annotations

import warnings

from torch import nn
from torch.utils.hooks import warn_if_has_hooks

from evener.errors import TaskError
from evener.torch_internals.gradient_hooks import has_accumulation_hooks


def refuse_hooks(model: nn.Module, strategy: str) -> None:
    """Raises:
    TaskError: If somebody waits for the gradient of a whole weight, who would wait in vain.
    """
    hooked = [name for name, parameter in model.named_parameters() if _has_hooks(parameter)]
    if hooked:
        raise TaskError(
            f"the model registers a hook on the gradient of {hooked[0]}, in whose place strategy {strategy!r} may put "
            "a piece; change gradients in the model's forward instead, by a hook on what the weight is multiplied "
            "with, or use strategy 'ddp'"
        )


def _has_hooks(parameter: nn.Parameter) -> bool:
    """By the warning that PyTorch has for those that cannot go where the parameter goes."""
    if has_accumulation_hooks(parameter):
        return True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_if_has_hooks(parameter)
    return bool(told)
