"""Training and evaluation mode of a model's modules.

A model may override ``train``: to keep some layers in evaluation mode, or to add weights together for evaluation and to
take them apart for training. So modes are restored by ``train``, and training begins with it, as in a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def begin_training(model: nn.Module) -> None:
    """Puts a model that was just built in training mode, whatever mode it was built in: ``from_pretrained`` returns
    models in evaluation mode, without dropout.

    In a model that is in training mode, two kinds of modules stay in evaluation mode, because they were put there on
    purpose: single layers, such as a BatchNorm with fixed statistics, and modules without trained parameters, such as a
    teacher.
    """
    kept = list(_set_apart(model)) if model.training else []
    model.train()
    for module in kept:
        module.training = False


def _set_apart(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if child.training:
            yield from _set_apart(child)
        elif not any(child.children()) or not any(p.requires_grad for p in child.parameters()):
            yield from (inner for inner in child.modules() if not inner.training)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of each module after the block."""
    before = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, was in before.items():  # parents come first, and take their children along
            if module.training != was:
                module.train(was)
        for module, was in before.items():
            module.training = was
