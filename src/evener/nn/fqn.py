"""Qualified names of modules and parameters, as in the model without wrappers.

``torch.compile`` and activation checkpointing wrap a module in another one, which adds the wrapper's attribute to the
names. Optimizer groups, dropout masks and checkpoints go by names, so these must not depend on wrappers.
"""

from __future__ import annotations

import re

from torch import nn

from evener.torch_internals.modules import WRAPPERS, compiled_from

_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPERS)})(?:\.|$)")


def clean_name(name: str) -> str:
    """Removes the parts that wrappers put into a qualified name: ``_orig_mod.0.weight`` becomes ``0.weight``."""
    return _WRAPPERS.sub("", name).removesuffix(".")


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the user's own module inside of ``torch.compile``, DistributedDataParallel and DataParallel wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif (compiled := compiled_from(model)) is not None:
            model = compiled
        else:
            return model


def clean_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns (clean name, parameter) for each parameter once, in the order of ``model.named_parameters()``."""
    return [(clean_name(name), parameter) for name, parameter in unwrapped(model).named_parameters()]
