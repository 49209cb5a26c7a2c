"""Temporary weights for a trial run of a model that may have none yet, or too many for this rank: one layer at a time.

Outside layers every weight is one number, expanded: it has shape, dtype and device, and takes no memory. While a layer
is called, its weights have memory of their own. The trial does not depend on values. Weights without values are drawn
small; buffers keep theirs. Afterwards the model is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.model_init import in_type
from evener.components.model_trial import attributes_kept
from evener.torch_internals.modules import own_buffers, own_parameters

_SMALL = 0.02


class Bodies:
    """Exchanges the weights of a model for temporary ones.

    Args:
        model: Whole model, perhaps on the meta device.
        device: Device of the trial run.
        dtype: Dtype of floating numbers; None leaves them.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._given: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def light(self) -> Iterator[None]:
        """Inside the block the model's weights take no memory. Attributes that its code sets are reset at the end."""
        try:
            with attributes_kept(self._model.modules()), _exchanged(self._model, self._lightened):
                yield
        finally:
            self._given.clear()

    @contextmanager
    def full(self, layer: nn.Module) -> Iterator[None]:
        """Gives the weights and buffers of a layer memory of their own, inside the block, which must be in
        :meth:`light`."""
        with _exchanged(layer, self._filled):
            yield

    def _lightened(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            one = torch.full((), _SMALL, dtype=self._type_of(tensor), device=self._device)
            found: Tensor = nn.Parameter(one.expand(tensor.shape), tensor.requires_grad)
        else:
            found = self._with_numbers(tensor)
        self._given[id(found)] = found, tensor
        return found

    def _filled(self, tensor: Tensor) -> Tensor:
        _, given = self._given.get(id(tensor), (tensor, tensor))
        if not isinstance(tensor, nn.Parameter):
            return tensor.detach().clone()
        return nn.Parameter(self._with_numbers(given), tensor.requires_grad)

    @torch.no_grad()
    def _with_numbers(self, tensor: Tensor) -> Tensor:
        dtype = self._type_of(tensor)
        if not tensor.is_meta:
            return tensor.detach().to(self._device, dtype, copy=True)
        made = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        return made.normal_(std=_SMALL) if made.is_floating_point() else made.zero_()

    def _type_of(self, tensor: Tensor) -> torch.dtype:
        return in_type(tensor, self._dtype) if self._dtype else tensor.dtype


@contextmanager
def _exchanged(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces parameters and buffers by the results of ``make`` inside the block; tied ones stay tied."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, Tensor] = {}
    for each in module.modules():
        holders: tuple[dict[str, Any], ...] = own_parameters(each), own_buffers(each)
        before.extend((held, dict(held)) for held in holders)
        for held in holders:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = made[id(tensor)] if id(tensor) in made else make(tensor)
                    made[id(tensor)] = held[name]
    try:
        yield
    finally:
        for held, was in before:
            held.clear()
            held.update(was)
