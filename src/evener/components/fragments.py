"""Cuts the parameters of a model into fragments."""

from __future__ import annotations

from torch import nn

from evener.errors import ConfigurationError


def cut_into_fragments(parameters: list[nn.Parameter], number: int, option: str) -> list[list[nn.Parameter]]:
    """Cuts parameters, in their order, into fragments of about the same number of elements.

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
    whole, before, at = sum(p.numel() for p in parameters) or 1, 0, 0
    for place, parameter in enumerate(parameters):
        middle = before + parameter.numel() / 2
        left = len(parameters) - place
        due = fragments[at] and (middle * number >= whole * (at + 1) or left <= number - at - 1)
        at += bool(due and at + 1 < number)
        fragments[at].append(parameter)
        before += parameter.numel()
    return fragments
