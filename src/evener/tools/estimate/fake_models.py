"""Builds a task's model of fake tensors, with fallbacks for constructors that cannot work with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from evener.hardware.memory import made_as
from evener.hardware.memory.counters import UNCOUNTED
from evener.torch_internals.dispatch import is_fake, without_fakes
from evener.torch_internals.modules import own_buffers, own_parameters


class PretendedModel:
    """Builds the task's model of fake tensors. If the constructor fails, it tries the meta device, and then real
    tensors, which are replaced by fake ones when the constructor has ended. ``built_for_real`` is True in the last
    case.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self.built_for_real = False

    def __call__(self) -> nn.Module:
        if torch.get_default_device().type == "meta":
            with without_fakes():
                return self._make()
        with made_as(UNCOUNTED):  # random init makes tensors that caught exceptions keep alive for a while
            model = self._made()
        return _of_fakes(model)

    def _made(self) -> nn.Module:
        for attempt in (self._make, self._on_meta):
            try:
                return attempt()
            except Exception:
                continue
        self.built_for_real = True
        with without_fakes():
            return self._make()

    def _on_meta(self) -> nn.Module:
        with without_fakes(), torch.device("meta"):
            return self._make()


def _of_fakes(model: nn.Module) -> nn.Module:
    """Replaces every parameter, buffer and tensor attribute by a new fake tensor: ``Module.to`` refuses fake tensors
    that have been written to.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (own_parameters(module), own_buffers(module)):
            for name, tensor in held.items():
                if tensor is not None:
                    made.setdefault(id(tensor), _fresh(tensor))
                    held[name] = made[id(tensor)]  # type: ignore[assignment]
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not is_fake(value):
                vars(module)[name] = made.setdefault(id(value), _fresh(value))
    return model


def _fresh(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="cpu" if tensor.is_meta else None, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    vars(made).update({key: value for key, value in vars(tensor).items() if not is_fake(tensor)})
    return made
