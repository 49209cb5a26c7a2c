"""Every call of a ``torch.autograd.Function``, also by a name that was bound before: ``setup_context`` and subclasses.

``torch.fx`` has no node for such a call: with its stand-ins for tensors ``apply`` runs the function's ``forward`` as
any other code, and the function's own ``backward`` is lost in silence. ``apply`` is bound to names when a module is
loaded (``relu = MyReLU.apply``), and from torch 2.15 on goes to C++ without a word of Python. There it asks the class
for its ``forward``, and for its ``setup_context`` if it is not that of the class which is borrowed here; what
``forward`` returns and is no tensor is handed on as it is.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.autograd.function import Function, _SingleLevelFunction

Record = Callable[[type[Function], tuple[Any, ...]], Any]


@contextmanager
def applied(record: Record) -> Iterator[None]:
    """Within the block ``record(function, args)`` is asked at each call of a function that there is when it begins;
    what it gives is the result, unless None."""
    replacements = {kind: _recorded(kind, record) for kind in _all_below(Function)}
    with ExitStack() as replaced:
        for kind, functions in replacements.items():
            for name, replacement in functions.items():
                replaced.enter_context(mock.patch.object(kind, name, staticmethod(replacement)))
        yield


def _all_below(kind: type[Function]) -> list[type[Function]]:
    """Without the class itself."""
    return [each for below in kind.__subclasses__() for each in (below, *_all_below(below))]


def _recorded(kind: type[Function], record: Record) -> dict[str, Callable[..., Any]]:
    """What takes the places of the functions of a class."""
    forward, setup_context = kind.forward, kind.setup_context
    sets_up = setup_context is not _SingleLevelFunction.setup_context
    given: list[Any] = []  # to calls whose context is not set up yet

    def forward_recorded(*args: Any, **kwargs: Any) -> Any:
        found = record(kind, args if sets_up else args[1:])  # else the first is the context
        result = forward(*args, **kwargs) if found is None else found
        if sets_up:
            given.append(found)
        return result

    def set_up(context: Any, inputs: Any, output: Any) -> None:
        if given.pop() is None:
            setup_context(context, inputs, output)

    return {"forward": forward_recorded} | ({"setup_context": set_up} if sets_up else {})
