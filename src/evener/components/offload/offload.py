"""Offload for a learner: optimizer state and activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.offload.activations import SMALLEST, OffloadedForward, SavedOutside
from evener.components.offload.host_storage import outside_of
from evener.components.offload.optimizer import OffloadedUpdates
from evener.components.sharded_tensor.local import local
from evener.core.config.offload import ACTIVATIONS, KINDS, OPTIMIZER, Offload
from evener.core.config.sizes import size_words
from evener.errors import ConfigurationError
from evener.torch_internals.optimizers import own_step


class OffloadState:
    """The offloaded state of a learner; empty if the settings request no offload.

    Args:
        asked: The settings.
        device: The rank's device.

    Raises:
        ConfigurationError: If this device cannot offload as requested.
    """

    def __init__(self, asked: Offload, device: torch.device) -> None:
        self._asked = asked
        self._device = device
        # Separate pools: otherwise one kind would permanently take buffers that the other frees for a moment.
        self._outsides = {kind: outside_of(device, asked) for kind in KINDS if kind in asked.kinds}
        self._forward: OffloadedForward | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._updates: OffloadedUpdates | None = None

    def apply(self, model: nn.Module) -> None:
        """Replaces the ``forward`` of the model if activations are to be offloaded."""
        outside = self._outsides.get(ACTIVATIONS)
        if outside is not None:
            saved = SavedOutside(outside, self._device.type)
            model.forward = self._forward = OffloadedForward(saved, model)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer, and offloads its state if requested.

        Raises:
            ConfigurationError: If its state cannot be offloaded.
        """
        self._optimizer, outside = optimizer, self._outsides.get(OPTIMIZER)
        if outside is not None:
            _check_devices(optimizer, self._device)
            self._updates = OffloadedUpdates(optimizer, outside)

    def step_of(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Returns the function that steps the optimizer, whether its state is offloaded or not."""
        return own_step(optimizer) if self._updates is None else self._updates.step

    def load(self, found: dict[str, Any]) -> None:
        """Loads the optimizer's state, as ``load_state_dict`` does."""
        assert self._optimizer is not None
        load = self._optimizer.load_state_dict if self._updates is None else self._updates.load
        load(found)

    def holds(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is offloaded."""
        return any(outside.holds(tensor) for outside in self._outsides.values())

    def close(self) -> None:
        """Frees all unused buffers, and the others when they are returned."""
        for outside in self._outsides.values():
            outside.close()

    def check(self, gather: Callable[[bool], list[bool]]) -> None:
        """Checks after the first step that activations are offloaded; see :meth:`OffloadedForward.check`. All ranks
        must call this together."""
        if self._forward is not None:
            self._forward.check(gather)

    @property
    def peaks(self) -> dict[str, int]:
        """The peak number of offloaded bytes, by kind."""
        return {kind: outside.peak for kind, outside in self._outsides.items()}

    @property
    def description(self) -> str:
        """A text for the user before a run; empty if nothing is offloaded."""
        where = next((outside.description for outside in self._outsides.values()), "")
        return f"{' and '.join(self._outsides)} kept in {where}" if where else ""

    def said(self, peaks: list[dict[str, int]]) -> str:
        """Returns a text for the user after a run.

        Args:
            peaks: The peaks of all ranks.
        """
        if not self._outsides:
            return ""
        most = (f"{kind} {size_words(max(each[kind] for each in peaks))}" for kind in self._outsides)
        said = f"{self.description}: at most {', '.join(most)}{' on a rank' if len(peaks) > 1 else ''}"
        idle = ACTIVATIONS in self._outsides and not any(each[ACTIVATIONS] for each in peaks)
        return f"{said} (nothing of {size_words(SMALLEST)} or more was saved)" if idle else said


def _check_devices(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    kinds = {local(p).device.type for group in optimizer.param_groups for p in group["params"]}
    # Weights that other ranks update are on the meta device.
    if kinds - {"meta"} and device.type not in kinds:
        raise ConfigurationError(
            "offload optimizer: with the option offload of strategy 'sharded' the weights are in the memory of the "
            "host already, and the state of their optimizer with them: leave one of both out"
        )
