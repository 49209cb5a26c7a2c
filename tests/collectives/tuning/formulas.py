"""What an all-reduce costs, in closed form: formulas of the literature, against which the simulation is tested.

All of them count in the alpha-beta-gamma model: a message of m bytes takes ``alpha + m * beta`` seconds, and
adding m bytes ``m * gamma``. A rank sends and receives at the same time.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19(1), 2005 (ring, halving-doubling and its fold); Sanders, Speck and Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009
(double tree).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from evener.collectives.tuning.cost import Link


class Formula(Protocol):
    """Seconds of an all-reduce of ``nbytes`` over ``world_size`` ranks with equal links."""

    def __call__(
        self, nbytes: float, world_size: int, link: Link, gamma_seconds_per_byte: float = 0.0
    ) -> float: ...


def ring(nbytes: float, world_size: int, link: Link, gamma_seconds_per_byte: float = 0.0) -> float:
    """``2 (p - 1) alpha + (p - 1) / p n (2 beta + gamma)``."""
    chunk = nbytes / world_size
    return (world_size - 1) * (2 * link.seconds(chunk) + chunk * gamma_seconds_per_byte)


def halving_doubling(
    nbytes: float, world_size: int, link: Link, gamma_seconds_per_byte: float = 0.0
) -> float:
    """``2 lg p alpha + (p - 1) / p n (2 beta + gamma)`` for a power of two.

    Any other number of ranks folds to the power of two below: ``2 alpha + 2 n beta + n gamma`` more.
    """
    exponent = world_size.bit_length() - 1
    power = 1 << exponent
    moved = nbytes * (power - 1) / power
    gamma = gamma_seconds_per_byte
    core = 2 * exponent * link.alpha_seconds + moved * (2 * link.beta_seconds_per_byte + gamma)
    return core if power == world_size else core + 2 * link.seconds(nbytes) + nbytes * gamma


def double_tree(
    nbytes: float, world_size: int, link: Link, gamma_seconds_per_byte: float = 0.0, segments: int = 1
) -> float:
    """``(2 d + k - 1) alpha + n ((2 + (2 d - 3) / k) beta + (1 + (d - 1) / k) gamma)``.

    That is for more than three ranks in trees of depth ``d = floor(lg p)``, and for k segments, which take
    ``2 d + k - 1`` rounds; exact from ``2 d`` segments on, within a tenth below. With one segment it is
    ``2 d alpha + n d (2 beta + gamma)``. Messages that a rank gets from both its children count one latency,
    for they travel at once. Where p is a power of two the roots have one child, which saves up to
    ``n (beta + gamma / 2) / k``.
    """
    depth = world_size.bit_length() - 1
    if depth == 0:
        return 0.0
    children = min(world_size - 1, 2)
    steady, fill = _moved_by_busiest_rank(world_size)
    moved = depth * children if segments == 1 else steady + fill / segments
    added = (1 + (depth - 1) / segments) * children / 2
    flow = nbytes * (moved * link.beta_seconds_per_byte + added * gamma_seconds_per_byte)
    return (2 * depth + segments - 1) * link.alpha_seconds + flow


def _moved_by_busiest_rank(world_size: int) -> tuple[float, float]:
    """Through the port of the busiest rank of a round, summed over rounds, go ``a + b / segments`` buffers.

    Of two or three ranks each tree is a root with its children.
    """
    depth = world_size.bit_length() - 1
    return (2, 2 * depth - 3) if depth > 1 else (world_size / 2, (world_size - 2) / 2)


def best_segments(nbytes: float, world_size: int, link: Link, gamma_seconds_per_byte: float = 0.0) -> int:
    """The ``segments`` that minimize :func:`double_tree`.

    They are close to ``sqrt(n ((2 d - 3) beta + (d - 1) gamma) / alpha)``.

    Raises:
        ValueError: If messages have no latency; then more segments are always better.
    """
    if link.alpha_seconds <= 0:
        raise ValueError("the best number of segments needs an alpha above 0: without one there is no best")
    depth = world_size.bit_length() - 1
    if depth == 0:
        return 1
    fill = _moved_by_busiest_rank(world_size)[1] * link.beta_seconds_per_byte
    fill += (depth - 1) * gamma_seconds_per_byte
    best = math.sqrt(nbytes * fill / link.alpha_seconds)
    return min(
        (1, max(1, math.floor(best)), max(1, math.ceil(best))),
        key=lambda count: double_tree(nbytes, world_size, link, gamma_seconds_per_byte, segments=count),
    )


def two_level(
    nbytes: float,
    ranks_per_host: int,
    hosts: int,
    inside: Link,
    between: Link,
    gamma_seconds_per_byte: float = 0.0,
    segments: int = 1,
    uplinks: int = 1,
) -> float:
    """Reduce-scatter in hosts of g ranks, :func:`double_tree` of n / g between them, all-gather in the hosts.

    ``2 (g - 1) alpha + (g - 1) / g n (2 beta + gamma) + T_tree(hosts, n / g)``. The g trees of a host share
    its ``uplinks`` network interfaces: each has ``uplinks / g`` of the bandwidth of one.
    """
    crowding = max(1.0, ranks_per_host / uplinks)
    shared = Link(between.alpha_seconds, between.beta_seconds_per_byte * crowding)
    inner = ring(nbytes, ranks_per_host, inside, gamma_seconds_per_byte)
    return inner + double_tree(nbytes / ranks_per_host, hosts, shared, gamma_seconds_per_byte, segments)


def one_shot(nbytes: float, world_size: int, link: Link, gamma_seconds_per_byte: float = 0.0) -> float:
    """Each rank reads all others: ``alpha + (p - 1) n (beta + gamma)``."""
    if world_size == 1:
        return 0.0
    return link.seconds((world_size - 1) * nbytes) + (world_size - 1) * nbytes * gamma_seconds_per_byte


def crossover(
    small: Callable[[float], float], large: Callable[[float], float], low_nbytes: float, high_nbytes: float
) -> float:
    """The size in bytes at which ``large`` overtakes ``small``, to a ten-thousandth; both are seconds of a size.

    Raises:
        ValueError: If ``small`` is not the faster one at ``low_nbytes`` and the slower one at ``high_nbytes``.
    """
    if small(low_nbytes) >= large(low_nbytes) or small(high_nbytes) <= large(high_nbytes):
        raise ValueError(f"the two do not cross between {low_nbytes} and {high_nbytes} bytes")
    while high_nbytes > low_nbytes * 1.0001:
        middle = math.sqrt(low_nbytes * high_nbytes)
        if small(middle) < large(middle):
            low_nbytes = middle
        else:
            high_nbytes = middle
    return high_nbytes
