"""What of a learner is outside of its device's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.offload.activations import SMALLEST, Forward, SavedOutside
from evener.components.offload.host_storage import outside_of
from evener.components.offload.optimizer import Updates
from evener.components.sharded_tensor.local import local
from evener.core.config.offload import ACTIVATIONS, KINDS, OPTIMIZER, Offload
from evener.core.config.sizes import size_words
from evener.errors import ConfigurationError


class Offloaded:
    """Nothing, or what the settings ask for.

    Args:
        asked: What is to be outside.
        device: Of the rank.

    Raises:
        ConfigurationError: If there is no outside.
    """

    def __init__(self, asked: Offload, device: torch.device) -> None:
        self._asked = asked
        self._device = device
        # One for each: what is free of one in an update would be taken by the other for good.
        self._outsides = {kind: outside_of(device, asked) for kind in KINDS if kind in asked.kinds}
        self._forward: Forward | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._updates: Updates | None = None

    def apply(self, model: nn.Module) -> None:
        """Takes the place of the ``forward`` of a model, if what it saves is to go outside."""
        outside = self._outsides.get(ACTIVATIONS)
        if outside is not None:
            saved = SavedOutside(outside, self._device.type)
            model.forward = self._forward = Forward(saved, model)

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates are those of an optimizer from now on.

        Raises:
            ConfigurationError: If its state cannot go outside.
        """
        self._optimizer, outside = optimizer, self._outsides.get(OPTIMIZER)
        if outside is not None:
            _check_devices(optimizer, self._device)
            self._updates = Updates(optimizer, outside)

    def update(self) -> None:
        """An update of all parameters that have a gradient."""
        assert self._optimizer is not None
        (self._updates or self._optimizer).step()

    def load(self, found: dict[str, Any]) -> None:
        """``load_state_dict`` of the optimizer."""
        assert self._optimizer is not None
        load = self._optimizer.load_state_dict if self._updates is None else self._updates.load
        load(found)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is outside."""
        return any(outside.holds(tensor) for outside in self._outsides.values())

    def close(self) -> None:
        """Gives back all rooms that nothing lies in, now or later."""
        for outside in self._outsides.values():
            outside.close()

    def check(self, gather: Callable[[bool], list[bool]]) -> None:
        """After the first step: see :meth:`Forward.check`. A collective call."""
        if self._forward is not None:
            self._forward.check(gather)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes outside at once, of each kind."""
        return {kind: outside.peak for kind, outside in self._outsides.items()}

    @property
    def words(self) -> str:
        """For people, before a run; empty if nothing is outside."""
        where = next((outside.words for outside in self._outsides.values()), "")
        return f"{' and '.join(self._outsides)} kept in {where}" if where else ""

    def said(self, peaks: list[dict[str, int]]) -> str:
        """For people, after a run.

        Args:
            peaks: Those of all ranks.
        """
        if not self._outsides:
            return ""
        most = (f"{kind} {size_words(max(each[kind] for each in peaks))}" for kind in self._outsides)
        said = f"{self.words}: at most {', '.join(most)}{' on a rank' if len(peaks) > 1 else ''}"
        idle = ACTIVATIONS in self._outsides and not any(each[ACTIVATIONS] for each in peaks)
        return f"{said} (nothing of {size_words(SMALLEST)} or more was saved)" if idle else said


def _check_devices(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    kinds = {local(p).device.type for group in optimizer.param_groups for p in group["params"]}
    if device.type not in kinds:
        raise ConfigurationError(
            "offload optimizer: with the option offload of strategy 'sharded' the weights are in the memory of the "
            "host already, and the state of their optimizer with them: leave one of both out"
        )
