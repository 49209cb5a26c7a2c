"""The strategies by name."""

from __future__ import annotations

import importlib

from evener.errors import ConfigurationError
from evener.strategies.base import Strategy
from evener.strategies.ddp import Ddp
from evener.strategies.dimension import Dimension
from evener.strategies.single import Single

STRATEGIES: dict[str, type[Strategy]] = {"single": Single, "ddp": Ddp, "dimension": Dimension}


def strategy_class(name: str, world_size: int) -> type[Strategy]:
    """The strategy called ``name``; ``auto`` is ``ddp``, or ``single`` for one rank.

    Your own class is named ``package.module:Class``.

    Raises:
        ConfigurationError: If there is none of that name, or it does not run on so many ranks.
    """
    if name == "auto" or (name in ("ddp", "dimension") and world_size == 1):
        name = "ddp" if world_size > 1 else "single"
    if name == "single" and world_size > 1:
        raise ConfigurationError(
            f"strategy 'single' runs on one rank, not on {world_size}; use 'ddp' or --processes 1"
        )
    return STRATEGIES[name] if name in STRATEGIES else _imported(name)


def _imported(name: str) -> type[Strategy]:
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None) if class_name else None
    except ModuleNotFoundError:
        found = None
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        known = ", ".join(["auto", *STRATEGIES])
        raise ConfigurationError(
            f"no strategy is called {name!r}; there are {known}, or package.module:Class of your own"
        )
    return found
