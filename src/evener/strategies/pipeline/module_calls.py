"""Intercepts calls of a model's modules while the model's own code runs around them.

Only outermost calls are intercepted, not those that a module makes inside. The hooks of a module are part of its call:
they run where the answer makes the call, and nowhere else::

    model.forward ─▶ its code ─▶ blocks.0(x) ─▶ answer("blocks.0", forward, (x,), {}) ─▶ its code goes on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from evener.torch_internals.modules import CALLED

Answer = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the name of the module, what makes the call, its hooks included, and the arguments. Returns the result."""
_REPLACED = (CALLED, "forward")
"""Methods of a module that are intercepted. Code may also call ``forward`` itself, without hooks."""


def leaves_of(model: nn.Module, opened: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the modules directly inside opened ones that are not opened themselves."""
    names = frozenset(opened)
    held = [name for name, _ in model.named_modules() if name not in names]
    return tuple(name for name in held if name.rpartition(".")[0] in names)


@contextmanager
def answered(leaves: Mapping[str, nn.Module], answer: Answer) -> Iterator[None]:
    """Calls ``answer`` in place of calls of these modules, inside the block."""
    busy = False  # while a call is being answered

    def ask(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal busy
        if busy:
            return forward(*args, **kwargs)
        busy = True
        try:
            return answer(name, forward, args, kwargs)
        finally:
            busy = False

    places = [(vars(leaf), key) for leaf in leaves.values() for key in _REPLACED]
    before = [held.get(key) for held, key in places]
    made = [partial(ask, name, getattr(leaf, key)) for name, leaf in leaves.items() for key in _REPLACED]
    for (held, key), asking in zip(places, made, strict=True):
        held[key] = asking
    try:
        yield
    finally:
        for (held, key), was in zip(places, before, strict=True):
            if was is None:
                del held[key]
            else:
                held[key] = was
