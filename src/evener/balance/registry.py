"""The balancers by the names that the command line and the configuration use.

A user's own is named ``package.module:Class``: a class of :class:`Balancer`. It is called with those of these arguments
that its constructor names:

=============  =========================================================================================
world_size     number of ranks
caps           the most samples of each rank, None for one that has no limit; None if nobody has any
quantum        shares are multiples of it, but for the one that holds the remainder of the batch
lookahead      steps whose shares are asked for ahead of the one that is computed
=============  =========================================================================================

One that names no ``caps`` or no ``quantum`` cannot be used with these options: they would be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evener.balance.base import Balancer, Equal, Fixed
from evener.balance.by_speed import BySpeed
from evener.balance.controller import DEFAULT_LOOKAHEAD
from evener.balance.shares import parse_shares
from evener.core.call_by_name import called_with, names_taken
from evener.core.plugins import find, is_named, suggestion
from evener.errors import ConfigurationError, ShareError

Caps = Sequence[int | None] | None

BALANCERS: dict[str, Callable[[int, Caps, int, int], Balancer]] = {
    "auto": lambda world_size, caps, quantum, lookahead: BySpeed(
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

    Your own is named ``package.module:Class``; above is how it is called.

    Raises:
        ShareError: If it names none, or the weights or caps do not fit ``world_size``.
    """
    if text in BALANCERS:
        return BALANCERS[text](world_size, caps, quantum, lookahead)
    if is_named(text, "balancer", BALANCERS):
        offered = {"world_size": world_size, "caps": caps, "quantum": quantum, "lookahead": lookahead}
        return make_own(_imported(text), text, offered)
    if not text or text[0].isalpha():
        raise ShareError(
            f"balance {text!r}: choose {', '.join(BALANCERS)}, one weight for each rank such as 3,2,1, or "
            f"package.module:Class of your own{suggestion(text, BALANCERS)}"
        )
    return Fixed(parse_shares(text, world_size), caps=caps, quantum=quantum)


def decides(text: str) -> bool:
    """Whether ``text`` names a balancer, and is no list of weights."""
    return text in BALANCERS or is_named(text, "balancer", BALANCERS)


def fixed_weights(text: str, world_size: int) -> list[float] | None:
    """The weights that ``text`` gives, adding up to 1; None if it names a balancer that decides.

    Raises:
        ShareError: As `make_balancer`.
    """
    return None if decides(text) else parse_shares(text, world_size)


def make_own(function: Callable[..., object], name: str, offered: dict[str, Any]) -> Balancer:
    """The balancer of the user's ``function``, which errors call ``name``, for the arguments of the table above.

    Raises:
        ShareError: It needs other arguments, takes no limit that is set, or makes no balancer.
    """
    try:
        ignored = _limits(offered) - names_taken(function, offered)
        made = called_with(function, offered)
    except ShareError:
        raise
    except ConfigurationError as error:
        raise ShareError(f"balance {name!r}: {error}") from error
    if ignored:
        raise ShareError(
            f"balance {name!r} takes no {' and no '.join(sorted(ignored))}: leave the option out, or give its "
            "constructor an argument of that name"
        )
    if not isinstance(made, Balancer):
        raise ShareError(f"balance {name!r} returned a {type(made).__name__}, not an evener.balance.Balancer")
    return made


def _limits(offered: dict[str, Any]) -> set[str]:
    """The names of the limits that the user has set."""
    return {name for name, usual in (("caps", None), ("quantum", 1)) if offered[name] != usual}


def _imported(name: str) -> Callable[..., Balancer]:
    balancer: Callable[..., Balancer] = find(
        name,
        "balancer",
        "subclass of evener.balance.Balancer",
        _is_balancer,
        known=BALANCERS,
        error=ShareError,
    )
    return balancer


def _is_balancer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Balancer)
