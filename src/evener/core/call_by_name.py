"""Calls user-defined components with only the keyword arguments that their signature names, as pytest does.

A simple balancer or all-reduce can have a simple constructor; one that needs more information adds arguments to it. If
Evener later offers further arguments, existing components keep working.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from evener.errors import ConfigurationError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def names_taken(function: Callable[..., Any], offered: dict[str, Any]) -> set[str]:
    """Returns the names in ``offered`` that ``function`` takes as keyword arguments; all, if it has ``**settings``.

    Raises:
        ConfigurationError: If ``function`` requires an argument that is not offered.
    """
    parameters = inspect.signature(function).parameters.values()
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in _OPEN and not (p.kind in _NAMED and p.name in offered)
    ]
    if missing:
        raise ConfigurationError(
            f"it needs {' and '.join(map(repr, missing))}; what it may name is {', '.join(offered)}"
        )
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return set(offered)
    return {p.name for p in parameters if p.kind in _NAMED} & offered.keys()


def called_with(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    """Calls ``function`` with those of the ``offered`` keyword arguments that it takes, and returns its result.

    Raises:
        ConfigurationError: If ``function`` requires an argument that is not offered.
    """
    taken = names_taken(function, offered)
    return function(**{name: value for name, value in offered.items() if name in taken})
