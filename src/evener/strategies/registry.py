"""Finds strategies by name and sets their options.

::

    --strategy pipeline,tensor --strategy-option schedule=gpipe --strategy-option tensor.plan=up=colwise
               ──────── ──────                   ────────                         ──────
               names of classes                  a field of one of them           the class, if both have the field
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Sequence
from typing import Any

from evener.core.call_by_name import called_with
from evener.core.config.strategy_names import STRATEGIES
from evener.core.plugins import find
from evener.errors import ConfigurationError
from evener.strategies.base import Strategy

Kind = type[Strategy]


def strategies_called(names: str, options: Sequence[str] = ()) -> tuple[Strategy, ...]:
    """Returns the strategies with these comma-separated names. Returns none for ``auto``.

    A user's own class is named ``package.module:Class``.

    Args:
        options: ``field=value`` for the strategy that has the field, or ``name.field=value``.

    Raises:
        ConfigurationError: If a name or an option is unknown, or an option is ambiguous or malformed.
    """
    kinds = {name: _kind(name) for name in names.split(",")} if names != "auto" else {}
    values: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigurationError(f"strategy option {option!r} is not of the form KEY=VALUE")
        name, field = _owner(kinds, key)
        values[name][field.name] = _parsed(kinds[name], field, value)
    return tuple(_made(name, kind, values[name]) for name, kind in kinds.items())


def strategy_called(name: str) -> Strategy:
    """Returns the strategy with this name and default options.

    Raises:
        ConfigurationError: If there is none.
    """
    return _made(name, _kind(name), {})


def _kind(name: str) -> Kind:
    kind: Kind = find(
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
    return kind


def _made(name: str, kind: Kind, values: dict[str, Any]) -> Strategy:
    if values:
        return kind(**values)
    try:
        found: Strategy = called_with(kind, {})
    except ConfigurationError as error:
        raise ConfigurationError(f"strategy {name!r} is made without arguments: {error}") from error
    return found


def _is_strategy(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Strategy)


def _fields(kind: Kind) -> dict[str, dataclasses.Field[Any]]:
    return {entry.name: entry for entry in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _owner(kinds: dict[str, Kind], key: str) -> tuple[str, dataclasses.Field[Any]]:
    """Returns the name of the strategy that has option ``key``, and the option's dataclass field."""
    of, _, field = key.rpartition(".")
    asked = kinds if not of else {of: kinds[of]} if of in kinds else {}
    owners = [name for name, kind in asked.items() if field in _fields(kind)]
    if len(owners) == 1:
        return owners[0], _fields(kinds[owners[0]])[field]
    if owners:
        raise ConfigurationError(
            f"strategy option {key!r} could be of {' and '.join(owners)}: write {owners[0]}.{key}"
        )
    there = [f"{name} has {', '.join(_fields(kind)) or 'none'}" for name, kind in kinds.items()]
    known = "; ".join(there) or "strategy 'auto' has none: name the strategy"
    raise ConfigurationError(f"there is no strategy option {key!r}; {known}")


def _parsed(kind: Kind, field: dataclasses.Field[Any], text: str) -> Any:
    """Parses ``text`` as a value of the field's type."""
    types = typing.get_args(hint := typing.get_type_hints(kind)[field.name]) or (hint,)
    if text == "none" and type(None) in types:
        return None
    for read in (_truth, int, float, str):
        if (bool if read is _truth else read) in types:
            try:
                return read(text)
            except ValueError:
                continue
    words = " or ".join(getattr(one, "__name__", str(one)) for one in types)
    raise ConfigurationError(f"strategy option {field.name} is {text!r}; it must be {words}")


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "yes", "1")
