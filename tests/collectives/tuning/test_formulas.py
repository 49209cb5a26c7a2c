from __future__ import annotations

import math

import pytest

from evener.collectives.tuning.cost import Link
from tests.collectives.tuning import formulas

LINK = Link(alpha_seconds=1e-5, beta_seconds_per_byte=1e-9)
GAMMA = 1e-10
MB = 1e6


@pytest.mark.parametrize(
    ("formula", "seconds"),
    [
        # 6 messages of a quarter: 6 * (10 us + 250 us), and three quarters added
        (formulas.ring, 6 * 260e-6 + 0.75 * 100e-6),
        # 2 * 2 messages: two halves, two quarters
        (formulas.halving_doubling, 4 * 10e-6 + 2 * 750e-6 + 0.75 * 100e-6),
        # up two levels and down two, a half from each of two children
        (formulas.double_tree, 4 * (10e-6 + 1000e-6) + 2 * 100e-6),
        # 3 buffers received and added
        (formulas.one_shot, 10e-6 + 3 * 1100e-6),
    ],
)
def test_four_ranks_and_a_megabyte_by_hand(formula: formulas.Formula, seconds: float) -> None:
    assert formula(MB, 4, LINK, GAMMA) == pytest.approx(seconds)


def test_folding_costs_two_messages_of_everything_more() -> None:
    fold = 2 * LINK.seconds(MB) + MB * GAMMA
    four = formulas.halving_doubling(MB, 4, LINK, GAMMA)
    assert formulas.halving_doubling(MB, 5, LINK, GAMMA) == pytest.approx(four + fold)


@pytest.mark.parametrize(
    "formula",
    [
        formulas.ring,
        formulas.halving_doubling,
        formulas.double_tree,
        formulas.one_shot,
    ],
)
def test_one_rank_costs_nothing(formula: formulas.Formula) -> None:
    assert formula(MB, 1, LINK, GAMMA) == 0


def test_double_tree_approaches_twice_the_bandwidth_term() -> None:
    nbytes = 1e12
    segments = formulas.best_segments(nbytes, 1024, LINK)
    assert formulas.double_tree(nbytes, 1024, LINK, segments=segments) == pytest.approx(
        2 * nbytes * LINK.beta_seconds_per_byte, rel=0.01
    )


@pytest.mark.parametrize("world_size", [2, 8, 100, 4096])
@pytest.mark.parametrize("nbytes", [1, 1e5, 1e8])
def test_no_other_number_of_segments_is_better(world_size: int, nbytes: float) -> None:
    best = formulas.best_segments(nbytes, world_size, LINK, GAMMA)
    times = {k: formulas.double_tree(nbytes, world_size, LINK, GAMMA, k) for k in range(1, 2 * best + 2)}
    assert times[best] == min(times.values())


def test_segments_have_no_best_number_without_latency() -> None:
    with pytest.raises(ValueError, match="alpha above 0"):
        formulas.best_segments(MB, 8, Link(0, 1e-9))


def test_two_level_is_a_ring_inside_and_a_tree_of_shares_between() -> None:
    inside = Link(1e-6, 1e-10)
    own_uplinks = formulas.two_level(MB, 8, 16, inside, LINK, GAMMA, segments=4, uplinks=8)
    assert own_uplinks == pytest.approx(
        formulas.ring(MB, 8, inside, GAMMA) + formulas.double_tree(MB / 8, 16, LINK, GAMMA, 4)
    )


def test_ranks_of_a_host_share_its_uplink() -> None:
    inside = Link(1e-6, 1e-10)
    shared = formulas.two_level(1e9, 8, 16, inside, LINK, segments=64)
    tree_of_all = formulas.double_tree(1e9, 16, LINK, segments=64)
    assert shared == pytest.approx(formulas.ring(1e9, 8, inside) + tree_of_all)


def test_crossover_is_where_two_lines_meet() -> None:
    size = formulas.crossover(lambda n: 1 + n, lambda n: 101 + n / 2, 1, 1e6)
    assert size == pytest.approx(200, rel=2e-4)


def test_crossover_of_ring_and_unsegmented_bandwidth_is_the_known_one() -> None:
    # 2 lg p alpha + 2 n beta against the ring: n = p alpha (p - 1 - lg p) / beta
    p = 256
    tree = lambda n: 2 * math.log2(p) * LINK.alpha_seconds + 2 * n * LINK.beta_seconds_per_byte  # noqa: E731
    size = formulas.crossover(tree, lambda n: formulas.ring(n, p, LINK), 1, 1e12)
    assert size == pytest.approx(p * 1e-5 * (p - 1 - 8) / 1e-9, rel=1e-3)


def test_crossover_of_what_does_not_cross_is_refused() -> None:
    with pytest.raises(ValueError, match="do not cross between 1 and 1000 bytes"):
        formulas.crossover(lambda n: n, lambda n: 2 * n, 1, 1000)
