"""The strategies by name."""

from __future__ import annotations

import inspect

from evener.calling import called_with
from evener.errors import ConfigurationError
from evener.plugins import STRATEGIES, find
from evener.strategies.base import Strategy


def strategy_called(name: str, world_size: int) -> Strategy:
    """The strategy called ``name``; ``auto`` is ``ddp``. For one rank any of Evener's own is ``single``.

    Your own class is named ``package.module:Class``.

    Raises:
        ConfigurationError: If there is none of that name.
    """
    if name == "auto":
        name = "ddp"
    if name in STRATEGIES and world_size == 1:
        name = "single"
    kind: type[Strategy] = find(
        STRATEGIES.get(name, name),
        "strategy",
        "subclass of evener.strategies.base.Strategy",
        _is_strategy,
        known=["auto", *STRATEGIES],
    )
    if inspect.isabstract(kind):
        lacking = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigurationError(
            f"strategy {name!r} does not say all that a strategy has to; it lacks {lacking}"
        )
    try:
        found: Strategy = called_with(kind, {})
    except ConfigurationError as error:
        raise ConfigurationError(f"strategy {name!r} is made without arguments: {error}") from error
    found.name = found.name or (name if name in STRATEGIES else "")
    return found


def _is_strategy(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Strategy)
