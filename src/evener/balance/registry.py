"""Creates balancers from the names that the command line and the configuration use.

Users name their own :class:`Balancer` subclass as ``package.module:Class``. Its constructor is called with those of
these arguments that it has parameters for:

=================  =====================================================================================
world_size         number of ranks
max_shares         the most samples of each rank, None for a rank without a limit; None if no rank has one
share_multiple_of  shares are multiples of it, except the one share that holds the remainder of the batch
lookahead          how many steps ahead of the current one shares may be asked for
=================  =====================================================================================

A constructor without a ``max_shares`` or ``share_multiple_of`` parameter cannot be used with that option: it would be
ignored.
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

MaxShares = Sequence[int | None] | None

BALANCERS: dict[str, Callable[[int, MaxShares, int, int], Balancer]] = {
    "auto": lambda world_size, max_shares, share_multiple_of, lookahead: BySpeed(
        world_size, max_shares=max_shares, share_multiple_of=share_multiple_of, lookahead=lookahead
    ),
    "equal": lambda world_size, max_shares, share_multiple_of, _: Equal(
        world_size, max_shares=max_shares, share_multiple_of=share_multiple_of
    ),
}


def make_balancer(
    text: str,
    world_size: int,
    *,
    max_shares: MaxShares = None,
    share_multiple_of: int = 1,
    lookahead: int = DEFAULT_LOOKAHEAD,
) -> Balancer:
    """Creates the balancer that ``text`` names.

    Args:
        text: ``auto``, ``equal``, weights such as ``3,2,1`` or ``0.5,0.3,0.2``, or ``package.module:Class`` for a class
            of the user (the module docstring says how it is called).
        world_size: Number of ranks.
        max_shares: The most samples of each rank; None, for all or for one, is no limit.
        share_multiple_of: Shares are multiples of it, except the one share that holds the remainder of the batch.
        lookahead: How many steps ahead of the current one shares may be asked for.

    Raises:
        ShareError: If ``text`` names no balancer, or the weights or limits do not fit ``world_size``.
    """
    if text in BALANCERS:
        return BALANCERS[text](world_size, max_shares, share_multiple_of, lookahead)
    if is_named(text, "balancer", BALANCERS):
        offered = {
            "world_size": world_size,
            "max_shares": max_shares,
            "share_multiple_of": share_multiple_of,
            "lookahead": lookahead,
        }
        return make_own(_imported(text), text, offered)
    if not text or text[0].isalpha():
        raise ShareError(
            f"balance {text!r}: choose {', '.join(BALANCERS)}, one weight for each rank such as 3,2,1, or "
            f"package.module:Class of your own{suggestion(text, BALANCERS)}"
        )
    return Fixed(parse_shares(text, world_size), max_shares=max_shares, share_multiple_of=share_multiple_of)


def decides(text: str) -> bool:
    """Returns True if ``text`` names a balancer, and False if it is a list of weights."""
    return text in BALANCERS or is_named(text, "balancer", BALANCERS)


def fixed_weights(text: str, world_size: int) -> list[float] | None:
    """Parses weights and scales them to a sum of 1. Returns None if ``text`` names a balancer.

    Raises:
        ShareError: If ``text`` is not a list of ``world_size`` weights.
    """
    return None if decides(text) else parse_shares(text, world_size)


def make_own(function: Callable[..., object], name: str, offered: dict[str, Any]) -> Balancer:
    """Creates a balancer with the user's class or function.

    Args:
        function: Called with those arguments of ``offered`` that it has parameters for.
        name: What error messages call it.
        offered: The arguments of the table in the module docstring.

    Raises:
        ShareError: If the function requires other arguments, has no parameter for a limit that is set, or does not
            return a `Balancer`.
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
    """Returns the names of the limits that differ from their defaults."""
    return {
        name for name, usual in (("max_shares", None), ("share_multiple_of", 1)) if offered[name] != usual
    }


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
