"""Parameters in a few flat tensors, one for each type, which travel as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatLayout:
    """The places of parameters in flat tensors.

    Args:
        parameters: The parameters, all on one device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        of_types: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            of_types.setdefault(parameter.dtype, []).append(place)
        self._places = list(of_types.values())
        self._kinds = list(of_types)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.parameters[0].device

    def empty(self, device: torch.device | str, *, wide: bool = False) -> list[Tensor]:
        """Returns flat tensors of zeros.

        Args:
            wide: True for at least float32, in which gradients are added.
        """
        return [
            torch.zeros(
                sum(self.parameters[place].numel() for place in places),
                dtype=torch.promote_types(kind, torch.float32) if wide else kind,
                device=device,
            )
            for places, kind in zip(self._places, self._kinds, strict=True)
        ]

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Returns for each parameter its part of ``flats``, in its shape."""
        found: dict[int, Tensor] = {}
        for places, flat in zip(self._places, flats, strict=True):
            sizes = [self.parameters[place].numel() for place in places]
            for place, part in zip(places, torch.split(flat, sizes), strict=True):
                found[place] = part.view(self.parameters[place].shape)
        return [found[place] for place in range(len(self.parameters))]

    @torch.no_grad()
    def gradients(self, flats: Sequence[Tensor]) -> list[float]:
        """Copies the parameters' gradients to ``flats``. Returns for each parameter 1 if it has one, else 0."""
        for view, parameter in zip(self.views(flats), self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        return [float(parameter.grad is not None) for parameter in self.parameters]

    @torch.no_grad()
    def read(self, flats: Sequence[Tensor]) -> None:
        """Copies weights from ``flats`` to the parameters."""
        for view, parameter in zip(self.views(flats), self.parameters, strict=True):
            parameter.copy_(view)

    @torch.no_grad()
    def write(self, flats: Sequence[Tensor]) -> None:
        """Copies the parameters' weights to ``flats``."""
        for view, parameter in zip(self.views(flats), self.parameters, strict=True):
            view.copy_(parameter)
