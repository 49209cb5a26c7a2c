"""Every call of a ``torch.autograd.Function``, also by a name that was bound before: ``_SingleLevelFunction``.

``torch.fx`` has no node for such a call: with its stand-ins for tensors ``apply`` runs the function's ``forward`` as
any other code, and the function's own ``backward`` is lost in silence. ``Function.apply`` is bound to names when a
module is loaded (``relu = MyReLU.apply``), and comes down to that of this class each time.

Tested with torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.function import Function, _SingleLevelFunction


@contextmanager
def applied(record: Callable[[type[Function], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within the block ``record(function, args)`` is asked at each call; what it gives is the result, unless None."""

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        found = record(cls, args)
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs) if found is None else found  # type: ignore[misc]

    assert "apply" not in vars(_SingleLevelFunction)
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
