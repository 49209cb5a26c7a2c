"""Position numbers for positional embeddings, also if this rank has only some positions of each sequence."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from evener.errors import ConfigurationError
from evener.nn.context import divided


def positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Returns this rank's position numbers in the whole sequence, for positional embeddings: (length,) int64.

    If sequences are not divided over ranks, this is ``torch.arange(length)``.

    Args:
        length: Length of the sequences as the model gets them, such as ``tokens.shape[1]``.
        device: Device of the result.

    Raises:
        ConfigurationError: If this rank has another number of positions.
    """
    asked: tuple[Any, ...] = length, device
    for given in asked:
        if isinstance(given, fx.Proxy):  # torch.fx traces the model: record a call for later
            read: Any = given.tracer.create_proxy("call_function", positions, (length, device), {})
            return cast(Tensor, read)
    sequence = divided()
    if sequence is None:
        return torch.arange(length, device=device)
    if length != sequence.size:
        raise ConfigurationError(
            f"evener.nn.positions({length}): this rank has {sequence.size} of the {sequence.length} positions of the "
            "sequences; give the length of the tensor that the model was given"
        )
    return sequence.positions(device)
