"""The balancers by the names that the command line and the configuration use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from evener.balance.base import Balancer, Equal, Fixed
from evener.balance.controller import DEFAULT_LOOKAHEAD, Auto
from evener.balance.shares import parse_shares
from evener.errors import ShareError

Caps = Sequence[int | None] | None

BALANCERS: dict[str, Callable[[int, Caps, int, int], Balancer]] = {
    "auto": lambda world_size, caps, quantum, lookahead: Auto(
        world_size, caps=caps, quantum=quantum, lookahead=lookahead
    ),
    "equal": lambda world_size, caps, quantum, _: Equal(world_size, caps=caps, quantum=quantum),
}


def make_balancer(
    text: str,
    world_size: int,
    *,
    caps: Caps = None,
    quantum: int = 1,
    lookahead: int = DEFAULT_LOOKAHEAD,
) -> Balancer:
    """The balancer that ``text`` names: ``auto``, ``equal``, or weights such as ``3,2,1`` or ``0.5,0.3,0.2``.

    Your own class is named ``package.module:Class``; it is called with these arguments.

    Raises:
        ShareError: If it names none, or the weights or caps do not fit ``world_size``.
    """
    if text in BALANCERS:
        return BALANCERS[text](world_size, caps, quantum, lookahead)
    if ":" in text:
        return _imported(text)(world_size, caps=caps, quantum=quantum, lookahead=lookahead)
    if not text or text[0].isalpha():
        raise ShareError(
            f"balance {text!r}: choose {', '.join(BALANCERS)}, one weight for each rank such as 3,2,1, or "
            "package.module:Class of your own"
        )
    return Fixed(parse_shares(text, world_size), caps=caps, quantum=quantum)


def fixed_weights(text: str, world_size: int) -> list[float] | None:
    """The weights that ``text`` gives, adding up to 1; None if it names a balancer that decides.

    Raises:
        ShareError: As `make_balancer`.
    """
    return None if text in BALANCERS or ":" in text else parse_shares(text, world_size)


def _imported(name: str) -> Callable[..., Balancer]:
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except (ModuleNotFoundError, ValueError):
        found = None
    if not (isinstance(found, type) and issubclass(found, Balancer)):
        raise ShareError(f"balance {name!r}: there is no such class of evener.balance.Balancer")
    return found
