"""A hook of a model that belongs to a preparation and not to the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class WeakHook:
    """Calls a method while its object is there. Does nothing in a copy of the model, or in one loaded from a file."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *given: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*given)

    def __reduce__(self) -> Any:
        return type(self), ()
