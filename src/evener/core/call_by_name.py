"""How a part of the user's own is called: with those of the offered arguments that it names, as pytest does it.

So the smallest balancer or all-reduce has the smallest constructor, one that wants to know more says so by naming it,
and what is offered one day does not break what was written before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from evener.errors import ConfigurationError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def names_taken(function: Callable[..., Any], offered: dict[str, Any]) -> set[str]:
    """The names of ``offered`` that ``function`` takes as keyword arguments; all, if it has ``**settings``.

    Raises:
        ConfigurationError: It cannot do without an argument that is not offered.
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
    """What ``function`` returns for those of the ``offered`` keyword arguments that it takes.

    Raises:
        ConfigurationError: It cannot do without an argument that is not offered.
    """
    taken = names_taken(function, offered)
    return function(**{name: value for name, value in offered.items() if name in taken})
