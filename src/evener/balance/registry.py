"""The balancers by the names that the command line and the configuration use."""

from __future__ import annotations

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

    Raises:
        ShareError: If it names none, or the weights or caps do not fit ``world_size``.
    """
    if text in BALANCERS:
        return BALANCERS[text](world_size, caps, quantum, lookahead)
    if not text or text[0].isalpha():
        raise ShareError(
            f"balance {text!r}: choose {', '.join(BALANCERS)}, or one weight for each rank such as 3,2,1"
        )
    return Fixed(parse_shares(text, world_size), caps=caps, quantum=quantum)
