"""Refuses hooks that a model's constructor has registered on parameters, if shards replace these parameters, or copies
of the model compute a part of the gradient: nobody would call the hooks with the whole gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.utils.hooks import warn_if_has_hooks

from evener.errors import ConfigurationError, TaskError
from evener.torch_internals.autograd import has_accumulation_hooks, hooks_of

DIVIDED = "in whose place strategy {!r} may put a piece"
COPIED = "of which strategy {!r} has copies that would not call it"
"""Why a hook is refused."""


def refuse_hooks(model: nn.Module, strategy: str, why: str = DIVIDED) -> None:
    """Raises TaskError if a hook is registered on a whole parameter: it would not be called for all of the gradient."""
    hooked = [name for name, parameter in model.named_parameters() if _has_hooks(parameter)]
    if hooked:
        raise TaskError(
            f"the model registers a hook on the gradient of {hooked[0]}, {why.format(strategy)}; change gradients in "
            "the model's forward instead, by a hook on what the weight is multiplied with, or use strategy 'ddp'"
        )


def refuse_late_hooks(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    """Raises ConfigurationError if a hook was registered on a parameter of which this rank has a shard, after the model
    was divided. Hooks of Evener and PyTorch, by the module that defines them, may be there.

    Args:
        parameters: Those that have hooks, and of which this rank has a shard.
        names: The names of the parameters.
    """
    for parameter in parameters:
        found = chain.from_iterable((each or {}).values() for each in hooks_of(parameter) or ())
        if not all(_home_of(hook).partition(".")[0] in ("evener", "torch") for hook in found):
            raise ConfigurationError(
                f"{names[parameter]} has a hook on its gradient, of which each rank has a part: change gradients in "
                "the model's forward instead, by a hook on what the weight is multiplied with, or use strategy 'ddp'"
            )


def _home_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Returns True if a parameter has hooks. Uses PyTorch's warning for hooks that are not serialized."""
    if has_accumulation_hooks(parameter):
        return True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_has_hooks(parameter)
    return bool(caught)
