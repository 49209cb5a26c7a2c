from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.schedule import Round, Schedule, Stretch, Topology
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.simulate import Network, simulate
from tests.collectives.tuning import formulas
from tests.tiers import ALWAYS, NIGHTLY, spread

INSIDE = Link(alpha_seconds=5e-6, beta_seconds_per_byte=1e-10)
BETWEEN = Link(alpha_seconds=2e-5, beta_seconds_per_byte=1e-9)
GAMMA = 1e-11
NETWORK = Network(INSIDE, BETWEEN, GAMMA)
UNIT = Network(Link(1, 1), Link(10, 5))


def seconds_of_round(topology: Topology, *transfers: tuple[int, int, bool], network: Network = UNIT) -> float:
    """One round, in which every transfer moves a whole buffer of 1 byte."""
    src, dst, reduce = zip(*transfers, strict=True)
    schedule = Schedule.from_stretches(
        topology, np.arange(2.0), [Stretch.once(Round.from_columns(src, dst, 0, 1, reduce))]
    )
    return simulate(schedule, 1, network)


def test_a_message_pays_latency_and_bytes() -> None:
    assert seconds_of_round(Topology.flat(2), (0, 1, False)) == 1 + 1


def test_messages_of_different_ranks_travel_at_once() -> None:
    assert seconds_of_round(Topology.flat(4), (0, 1, False), (1, 0, False), (2, 3, False)) == 1 + 1


def test_a_port_sends_one_message_at_a_time() -> None:
    assert seconds_of_round(Topology.flat(4), (0, 1, False), (0, 2, False), (0, 3, False)) == 1 + 3


def test_a_port_receives_one_message_at_a_time() -> None:
    assert seconds_of_round(Topology.flat(3), (1, 0, False), (2, 0, False)) == 1 + 2


def test_ranks_of_a_host_share_its_uplink_in_both_directions() -> None:
    topology = Topology.of_hosts([3, 3])
    across = [(0, 3, False), (1, 4, False), (2, 5, False)]
    assert seconds_of_round(topology, *across) == 10 + 3 * 5
    assert seconds_of_round(topology, *across, (3, 0, False)) == 10 + 3 * 5


def test_more_uplinks_share_the_load() -> None:
    topology = Topology.of_hosts([4, 4])
    across = [(rank, rank + 4, False) for rank in range(4)]
    for uplinks, load in ((1, 4), (2, 2), (4, 1), (9, 1)):
        network = Network(UNIT.inside, UNIT.between, uplinks=uplinks)
        assert seconds_of_round(topology, *across, network=network) == 10 + load * 5


def test_between_two_hosts_the_slower_uplink_counts() -> None:
    network = Network(Link(1, 1), (Link(10, 5), Link(20, 3), Link(1, 1)))
    topology = Topology.of_hosts([1, 1, 1])
    assert seconds_of_round(topology, (0, 1, False), network=network) == 20 + 5
    assert seconds_of_round(topology, (1, 2, False), network=network) == 20 + 3


def test_hosts_may_have_links_of_their_own_inside() -> None:
    network = Network((Link(1, 1), Link(1, 4)), Link(0, 0))
    assert seconds_of_round(Topology.of_hosts([2, 2]), (0, 1, False), (2, 3, False), network=network) == 1 + 4


def test_adding_costs_gamma_and_copying_does_not() -> None:
    network = Network(Link(1, 1), Link(1, 1), gamma_seconds_per_byte=7)
    assert seconds_of_round(Topology.flat(2), (0, 1, True), network=network) == 2 + 7
    assert seconds_of_round(Topology.flat(2), (0, 1, False), network=network) == 2


def test_a_transfer_to_itself_costs_only_the_addition() -> None:
    network = Network(Link(1, 1), Link(1, 1), gamma_seconds_per_byte=7)
    assert seconds_of_round(Topology.flat(2), (0, 0, True), network=network) == 7


def test_hosts_do_not_matter_where_all_links_are_alike_and_every_rank_has_an_uplink() -> None:
    ring = ALGORITHMS["ring"]
    network = Network(INSIDE, INSIDE, GAMMA, uplinks=2)
    assert simulate(ring(Topology.of_hosts([2, 2])), 1e6, network) == simulate(
        ring(Topology.flat(4)), 1e6, network
    )


def test_links_of_another_number_of_hosts_are_refused() -> None:
    network = Network(INSIDE, (BETWEEN, BETWEEN))
    with pytest.raises(ValueError, match="links for 2 hosts, the topology has 3 hosts"):
        simulate(ALGORITHMS["ring"](Topology.of_hosts([1, 1, 1])), 1e6, network)


@pytest.mark.parametrize(("gamma", "uplinks"), [(0.0, 0), (-1.0, 1), (float("nan"), 1)])
def test_a_network_without_uplinks_or_with_a_negative_gamma_is_refused(gamma: float, uplinks: int) -> None:
    with pytest.raises(ValueError, match="at least one uplink and a finite gamma"):
        Network(INSIDE, BETWEEN, gamma, uplinks)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 12, 64])
@pytest.mark.parametrize(
    ("name", "formula"),
    [("ring", formulas.ring), ("halving", formulas.halving_doubling), ("direct", formulas.one_shot)],
)
@pytest.mark.parametrize("nbytes", [1e3, 1e7])
def test_closed_formulas_hold_exactly(
    name: str, formula: formulas.Formula, world_size: int, nbytes: float
) -> None:
    simulated = simulate(ALGORITHMS[name](Topology.flat(world_size)), nbytes, NETWORK)
    assert simulated == pytest.approx(formula(nbytes, world_size, INSIDE, GAMMA))


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 7, 9, 13, 31, 100, 1000])
@pytest.mark.parametrize("segments", [1, 20, 50])
def test_double_tree_takes_exactly_what_its_formula_says(world_size: int, segments: int) -> None:
    simulated = simulate(ALGORITHMS["tree"](Topology.flat(world_size), segments), 1e6, NETWORK)
    assert simulated == pytest.approx(formulas.double_tree(1e6, world_size, INSIDE, GAMMA, segments))


@pytest.mark.parametrize("world_size", [5, 8, 9, 31, 64, 100, 1000])
@pytest.mark.parametrize("segments", [2, 3, 5, 8])
def test_double_tree_that_is_never_full_is_estimated_to_a_tenth(world_size: int, segments: int) -> None:
    simulated = simulate(ALGORITHMS["tree"](Topology.flat(world_size), segments), 1e6, NETWORK)
    formula = formulas.double_tree(1e6, world_size, INSIDE, GAMMA, segments)
    assert simulated == pytest.approx(formula, rel=0.1)


@pytest.mark.parametrize("world_size", [4, 16, 64, 1024])
@pytest.mark.parametrize("segments", [1, 20, 50])
def test_roots_with_one_child_save_a_little(world_size: int, segments: int) -> None:
    simulated = simulate(ALGORITHMS["tree"](Topology.flat(world_size), segments), 1e6, NETWORK)
    formula = formulas.double_tree(1e6, world_size, INSIDE, GAMMA, segments)
    saved = 1e6 / segments * (INSIDE.beta_seconds_per_byte + GAMMA / 2)
    assert formula - saved * 1.0001 <= simulated <= formula * 1.0001


@pytest.mark.parametrize("sizes", [(8, 5), (4, 3), (2, 12), (1, 9)])
@pytest.mark.parametrize("segments", [1, 8, 30])
def test_ring_tree_takes_exactly_what_its_formula_says(sizes: tuple[int, int], segments: int) -> None:
    per_host, hosts = sizes
    schedule = ALGORITHMS["ring-tree"](Topology.of_hosts([per_host] * hosts), segments)
    formula = formulas.two_level(1e6, per_host, hosts, INSIDE, BETWEEN, GAMMA, segments)
    assert simulate(schedule, 1e6, NETWORK) == pytest.approx(formula)


@pytest.mark.parametrize("world_size", spread([32, 100, 512, 4096, 65536], *[ALWAYS] * 4, NIGHTLY))
def test_ring_overtakes_the_double_tree_where_the_formulas_say(world_size: int) -> None:
    def segments(nbytes: float) -> int:
        return formulas.best_segments(nbytes, world_size, INSIDE, GAMMA)

    predicted = formulas.crossover(
        lambda n: formulas.double_tree(n, world_size, INSIDE, GAMMA, segments(n)),
        lambda n: formulas.ring(n, world_size, INSIDE, GAMMA),
        1e3,
        1e15,
    )
    assert_ring_overtakes("tree", Topology.flat(world_size), predicted, segments)


@pytest.mark.parametrize(
    ("hosts", "per_host"), spread([(8, 8), (32, 4), (50, 8), (512, 8), (8192, 8)], *[ALWAYS] * 4, NIGHTLY)
)
def test_ring_overtakes_the_ring_tree_where_the_formulas_say(hosts: int, per_host: int) -> None:
    def segments(nbytes: float) -> int:
        return formulas.best_segments(nbytes, hosts, BETWEEN, GAMMA / per_host)

    predicted = formulas.crossover(
        lambda n: formulas.two_level(n, per_host, hosts, INSIDE, BETWEEN, GAMMA, segments(n)),
        lambda n: formulas.ring(n, hosts * per_host, BETWEEN, GAMMA),
        1e3,
        1e15,
    )
    assert_ring_overtakes("ring-tree", Topology.of_hosts([per_host] * hosts), predicted, segments)


def assert_ring_overtakes(
    name: str, topology: Topology, predicted_nbytes: float, segments_at: Callable[[float], int]
) -> None:
    """Simulated, the ring is slower 5% below the size where the formulas cross, and faster 5% above."""
    for factor, ring_wins in ((0.95, False), (1.05, True)):
        nbytes = factor * predicted_nbytes
        ring = simulate(ALGORITHMS["ring"](topology), nbytes, NETWORK)
        other = simulate(ALGORITHMS[name](topology, segments_at(nbytes)), nbytes, NETWORK)
        assert (ring < other) == ring_wins


def test_65536_ranks_are_a_handful_of_rounds() -> None:
    topology = Topology.of_hosts([8] * 8192)
    for name, most_rounds in (("ring", 2), ("tree", 4 * 16), ("ring-tree", 2 + 4 * 13)):
        assert len(ALGORITHMS[name](topology, 300).stretches) <= most_rounds
