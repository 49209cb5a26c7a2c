"""Where the positions at hand are in the whole sequence, of which this rank may have a piece."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from evener.errors import ConfigurationError
from evener.nn.context import divided


def positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Where the positions at hand are in the whole sequence, for embeddings of positions: (length,) int64.

    Where sequences are whole this is ``torch.arange(length)``.

    Args:
        length: Of the sequences as the model sees them, such as ``tokens.shape[1]``.
        device: Of the result.

    Raises:
        ConfigurationError: If the sequences at hand are of another length.
    """
    asked: tuple[Any, ...] = length, device
    for given in asked:
        if isinstance(given, fx.Proxy):  # a model's code is being read, to be run later in parts
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
