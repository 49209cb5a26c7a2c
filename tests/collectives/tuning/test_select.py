from __future__ import annotations

import json

import pytest

from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.schedule import Topology
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.select import (
    MeasuredCosts,
    TimingSample,
    best_segments,
    bucket_size,
    choose,
    exposed_seconds,
    interpolate,
    predict,
)
from evener.collectives.tuning.simulate import Network, simulate

LINK = Link(alpha_seconds=1e-5, beta_seconds_per_byte=1e-9)
NETWORK = Network(LINK, Link(1e-4, 1e-8), gamma_seconds_per_byte=1e-10)
UNTIMED = MeasuredCosts(Topology.flat(6), NETWORK)
TIMED = MeasuredCosts(
    Topology.of_hosts([2, 1]),
    NETWORK,
    (
        TimingSample("quick", 1000, 1e-5),
        TimingSample("quick", 1_000_000, 1e-2),
        TimingSample("broad", 1000, 1e-4),
        TimingSample("broad", 1_000_000, 1e-3),
    ),
)


def test_small_messages_take_few_rounds_and_large_ones_little_bandwidth() -> None:
    assert choose(UNTIMED, 64).name == "direct"
    assert choose(UNTIMED, 1 << 30).name == "ring"


def test_the_chosen_is_the_fastest_of_all_predictions() -> None:
    for exponent in range(6, 30, 4):
        fastest = choose(UNTIMED, 1 << exponent)
        predictions = [predict(UNTIMED, name, 1 << exponent) for name in ALGORITHMS]
        assert fastest.seconds == min(prediction.seconds for prediction in predictions)


def test_what_was_timed_is_chosen_by_its_times() -> None:
    assert choose(TIMED, 1000).name == "quick"
    assert choose(TIMED, 1_000_000).name == "broad"


def test_only_the_given_names_are_chosen_from() -> None:
    assert choose(TIMED, 1000, ["ring", "broad"]).name in ("ring", "broad")
    assert choose(UNTIMED, 64, ["ring"]).name == "ring"


def test_of_equals_the_first_is_chosen() -> None:
    costs = MeasuredCosts(Topology.flat(2), NETWORK, (TimingSample("b", 10, 1.0), TimingSample("a", 10, 1.0)))
    assert choose(costs, 10).name == "b"


def test_large_messages_flow_through_trees_in_segments() -> None:
    small, large = (predict(UNTIMED, "tree", nbytes) for nbytes in (1 << 10, 1 << 26))
    assert small.segments == 1
    assert large.segments > 8
    whole = simulate(ALGORITHMS["tree"](UNTIMED.topology, 1), 1 << 26, NETWORK)
    assert large.seconds < whole


def test_measurement_corrects_the_simulated_segments() -> None:
    """Those that were fastest at the nearest size, whatever the simulation says."""
    samples = ((1 << 20, 2.0, 1), (1 << 20, 1.0, 4), (1 << 26, 80.0, 1), (1 << 26, 90.0, 32))
    costs = MeasuredCosts(UNTIMED.topology, NETWORK, tuple(TimingSample("tree", *each) for each in samples))
    small, large = (predict(costs, "tree", nbytes) for nbytes in (1 << 21, 1 << 25))
    assert (small.segments, large.segments) == (4, 1)
    assert predict(costs, "tree", 1 << 26).seconds == pytest.approx(80.0)
    assert MeasuredCosts.from_json(costs.to_json()) == costs
    with pytest.raises(ValueError, match="at least one segment"):
        TimingSample("tree", 1, 1.0, 0)


def test_only_what_flows_is_cut() -> None:
    assert best_segments(UNTIMED.topology, NETWORK, "tree", 1 << 26) > 8
    assert best_segments(UNTIMED.topology, NETWORK, "ring", 1 << 26) == 1
    assert best_segments(UNTIMED.topology, NETWORK, "native", 1 << 26) == 1


@pytest.mark.parametrize("topology", [Topology.flat(1), Topology.flat(4)])
def test_nothing_to_send_takes_no_time(topology: Topology) -> None:
    nbytes = 0 if topology.world_size > 1 else 1000
    assert choose(MeasuredCosts(topology, NETWORK), nbytes).seconds == 0


def test_many_ranks_are_never_served_directly() -> None:
    assert choose(MeasuredCosts(Topology.flat(2000), NETWORK), 8).name != "direct"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'rang'; known are broad, direct, .*quick, ring"):
        predict(TIMED, "rang", 100)
    with pytest.raises(ValueError, match="names is empty"):
        choose(UNTIMED, 100, [])


def test_interpolation_is_straight_in_logarithms() -> None:
    samples = [(100, 1.0), (10_000, 100.0)]
    assert interpolate(samples, 1000) == pytest.approx(10.0)
    assert interpolate(samples, 100) == pytest.approx(1.0)
    assert interpolate(samples, 10_000) == pytest.approx(100.0)


def test_outside_its_samples_latency_or_bandwidth_is_all() -> None:
    samples = [(10_000, 100.0), (100, 1.0)]
    assert interpolate(samples, 1) == 1.0
    assert interpolate(samples, 40_000) == 400.0


def test_of_samples_of_one_size_the_fastest_counts() -> None:
    assert interpolate([(100, 3.0), (100, 2.0), (100, 5.0)], 100) == 2.0


@pytest.mark.parametrize(
    "costs",
    [
        UNTIMED,
        TIMED,
        MeasuredCosts(Topology.of_hosts([2, 1]), Network((LINK, LINK), (LINK, LINK), 0.0, uplinks=2)),
    ],
)
def test_costs_survive_json(costs: MeasuredCosts) -> None:
    assert MeasuredCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", json.dumps({"topology": {"hosts": [[0]]}, "network": 3})]
)
def test_other_text_is_refused_as_costs(text: str) -> None:
    with pytest.raises(ValueError, match="no costs of collectives"):
        MeasuredCosts.from_json(text)


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_samples_are_positive(nbytes: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="positive size and time"):
        TimingSample("any", nbytes, seconds)


def test_one_bucket_exposes_all_of_its_all_reduce() -> None:
    assert exposed_seconds(100, 100, 5.0, lambda nbytes: nbytes / 50) == 2.0


def test_buckets_hide_all_but_the_last_behind_backward() -> None:
    # ready at 1, 2, 3, 4, 5 s; each takes 0.5 s
    assert exposed_seconds(20, 100, 5.0, lambda nbytes: 0.5) == 0.5


def test_buckets_slower_than_backward_queue_up() -> None:
    # the first is ready at 1 s, then five of 3 s one by one end at 16 s
    assert exposed_seconds(20, 100, 5.0, lambda nbytes: 3.0) == 11.0


def test_latency_makes_buckets_large_and_bandwidth_makes_them_small() -> None:
    total = 1 << 26
    latency_bound = bucket_size(total, 0.01, lambda nbytes: 0.1)
    bandwidth_bound = bucket_size(total, 1.0, lambda nbytes: 1e-9 * nbytes)
    assert latency_bound == total
    assert bandwidth_bound == 1 << 18


def test_bucket_size_exposes_least_among_the_candidates() -> None:
    def seconds_of(nbytes: int) -> float:
        return 1e-4 + 1e-9 * nbytes

    sizes = [1 << exponent for exponent in range(16, 27)]
    best = bucket_size(100_000_000, 0.08, seconds_of, sizes)
    exposed = {size: exposed_seconds(size, 100_000_000, 0.08, seconds_of) for size in sizes}
    assert exposed[best] == min(exposed.values())
    assert 1 << 16 < best < 1 << 26


def test_of_equally_exposed_buckets_the_largest_are_chosen() -> None:
    assert bucket_size(64, 1.0, lambda nbytes: 0.0, [8, 32, 16]) == 32


def test_small_models_have_one_bucket() -> None:
    assert bucket_size(1000, 1.0, lambda nbytes: 1.0) == 1000


def test_buckets_without_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="total_nbytes=0"):
        bucket_size(0, 1.0, lambda nbytes: 1.0)
