"""Cuts the parameters of a model into fragments."""

from __future__ import annotations

import math

from torch import nn

from evener.components.sharded_tensor.local import is_divided
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.errors import ConfigurationError


def cut_into_fragments(parameters: list[nn.Parameter], number: int, option: str) -> list[list[nn.Parameter]]:
    """Cuts parameters, in their order, into fragments of about the same number of elements.

    Of a divided parameter the elements of all its parts count, so that the fragments depend on no rank.

    Args:
        option: The name of the option that asks for them.

    Raises:
        ConfigurationError: If there are fewer parameters than fragments.
    """
    if number > len(parameters):
        raise ConfigurationError(
            f"{option} is {number}, and the model has {len(parameters)} parameters: give at most that many"
        )
    fragments: list[list[nn.Parameter]] = [[] for _ in range(number)]
    whole, before, at = sum(map(_elements, parameters)) or 1, 0, 0
    for place, parameter in enumerate(parameters):
        middle = before + _elements(parameter) / 2
        left = len(parameters) - place
        due = fragments[at] and (middle * number >= whole * (at + 1) or left <= number - at - 1)
        at += bool(due and at + 1 < number)
        fragments[at].append(parameter)
        before += _elements(parameter)
    return fragments


def _elements(parameter: nn.Parameter) -> int:
    piece = shard_spec(parameter)
    if piece is None or is_divided(parameter):  # the shape of a DTensor is that of the whole
        return parameter.numel()
    return math.prod(piece.whole_shape(parameter.shape))
