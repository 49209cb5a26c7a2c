"""Names of a model's modules and parameters as the model without wrappers has them.

``torch.compile`` and activation checkpointing wrap a module in another one, and its names then hold the wrapper's
attribute. What is known by name (optimizer groups, masks of dropout, checkpoints) must not change with that.
"""

from __future__ import annotations

import re

from torch import nn

from evener.torch_internals.wrappers import ATTRIBUTES, compiled_from

_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(ATTRIBUTES)})(?:\.|$)")


def clean_name(name: str) -> str:
    """The qualified name without the parts that wrappers put into it: ``_orig_mod.0.weight`` is ``0.weight``."""
    return _WRAPPERS.sub("", name).removesuffix(".")


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module behind ``torch.compile`` and data-parallel wrappers, whose attribute is ``module``."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif (compiled := compiled_from(model)) is not None:
            model = compiled
        else:
            return model


def clean_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters, each once, in the order of ``model.named_parameters()``, by their clean names."""
    return [(clean_name(name), parameter) for name, parameter in unwrapped(model).named_parameters()]
