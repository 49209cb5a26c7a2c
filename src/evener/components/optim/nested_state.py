"""Takes tensors out of lists and dictionaries in an optimizer's state, so that a checkpoint writes each as any other.

Shampoo and SOAP keep a matrix for each dimension of a weight, in a list::

    state    {"step": 3, "sides": [a, b]}
    tensors  {"sides#0": a, "sides#1": b}
    rest     {"step": 3, "sides": [{"evener_tensor": "sides#0"}, {"evener_tensor": "sides#1"}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MARK = "evener_tensor"


def leaves_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields all entries of nested lists, tuples and dictionaries, with keys. Anything else is one leaf."""
    for name, entry in _entries(value):
        yield from leaves_of(f"{key}#{name}", entry)
    if not _is_nest(value):
        yield key, value


def without_tensors(key: str, value: Any, goes: Callable[[Any], bool]) -> Any:
    """Returns a nested value with a mark in the place of each tensor that ``goes``."""
    if not _is_nest(value):
        return {_MARK: key} if goes(value) else value
    return _rebuilt(value, lambda name, entry: without_tensors(f"{key}#{name}", entry, goes))


def with_tensors(entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a parameter with its tensors where the marks are."""
    used = set[str]()

    def filled(value: Any) -> Any:
        if isinstance(value, dict) and value.keys() == {_MARK}:
            used.add(value[_MARK])
            return entries[value[_MARK]]
        return _rebuilt(value, lambda _, entry: filled(entry)) if _is_nest(value) else value

    found = {key: filled(value) for key, value in entries.items()}
    return {key: value for key, value in found.items() if key not in used}


def _is_nest(value: Any) -> bool:
    return type(value) in (list, tuple, dict)


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items() if type(value) is dict else enumerate(value)) if _is_nest(value) else iter(())


def _rebuilt(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    found = {name: change(name, entry) for name, entry in _entries(value)}
    return found if isinstance(value, dict) else type(value)(found.values())
