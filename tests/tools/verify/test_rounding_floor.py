from __future__ import annotations

import math

import pytest
import torch

from evener.tools.verify import rounding_floor as floors
from evener.tools.verify.rounding_floor import ComparedPlace, PlaceKind
from evener.tools.verify.trajectory import Trajectory
from tests.tools.verify.runs import EPS, disturbed, run, scaled, vector

INF, NAN = math.inf, math.nan
WEIGHT = ComparedPlace(2, PlaceKind.WEIGHT, "fc.weight")


def floor_after(reference: Trajectory, others: list[floors.Numbers]) -> floors.Numbers:
    return floors.floor(reference, others, floors.real_and_noise(reference, others)[1], EPS)


def floor_of(*ulps: float) -> floors.Numbers:
    return floor_after(run(), [floors.differences(run(), disturbed(each)) for each in ulps])


def test_runs_are_compared_at_every_place_in_the_order_of_a_step() -> None:
    places = list(floors.differences(run(), run()))
    assert [str(place) for place in places] == [
        "the loss of step 0",
        "mean in step 0",
        "the gradient of fc.weight in step 0",
        "the gradient of key in step 0",
        "the loss of step 1",
        "the gradient of fc.weight in step 1",
        "the gradient of key in step 1",
        "fc.weight after 2 steps",
        "key after 2 steps",
        "mean after 2 steps",
    ]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [4.0, 6.0], 5.0),
        ([1.0, -INF, NAN], [2.0, -INF, NAN], 1.0),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, NAN], [1.0, 2.0], NAN),
    ],
)
def test_the_distance_of_two_tensors(a: list[float], b: list[float], expected: float) -> None:
    assert floors.distance(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected, nan_ok=True)


def test_an_absent_gradient_is_one_of_zeros() -> None:
    without = [{"key": sketches["key"]} for sketches in run().gradients]
    found = floors.differences(run(), run(gradients=without))
    assert found[ComparedPlace(0, PlaceKind.GRADIENT, "fc.weight")] == 5.0


def test_the_floor_is_the_largest_of_the_disturbed_runs_so_far() -> None:
    found = floor_of(3, 8, 5)
    assert found[ComparedPlace(0, PlaceKind.LOSS)] == pytest.approx(8 * EPS)
    assert found[ComparedPlace(1, PlaceKind.LOSS)] == found[ComparedPlace(0, PlaceKind.LOSS)], (
        "the second loss is half as large"
    )
    assert found[WEIGHT] == pytest.approx(8 * EPS * math.sqrt(5), rel=0.2)


def test_the_floor_is_at_least_one_unit_in_the_last_place() -> None:
    found = floor_of(0)
    assert found[ComparedPlace(0, PlaceKind.LOSS)] == EPS
    assert found[ComparedPlace(0, PlaceKind.GRADIENT, "fc.weight")] == pytest.approx(5 * EPS)
    assert found[WEIGHT] == pytest.approx(math.sqrt(5) * EPS)
    assert found[ComparedPlace(0, PlaceKind.STATISTIC, "mean")] == pytest.approx(0.5 * EPS)
    assert found[ComparedPlace(0, PlaceKind.GRADIENT, "key")] == pytest.approx(5 / math.sqrt(3) * EPS), (
        "of all gradients"
    )


def test_a_whole_number_has_no_floor() -> None:
    reference = run(weights={"mean": torch.tensor(3)})
    apart = floors.differences(reference, run(weights={"mean": torch.tensor(4)}))
    same = floors.differences(reference, reference)
    place = ComparedPlace(2, PlaceKind.BUFFER, "mean")
    assert floors.times(apart, floor_after(reference, [same]))[place] == INF
    assert floors.times(same, floor_after(reference, [same]))[place] == 0


def test_a_gradient_that_is_never_the_same_twice_is_noise() -> None:
    others = [floors.differences(run(), disturbed())]
    assert floors.real_and_noise(run(), others)[1] == ["key"]
    assert floors.real_and_noise(run(), others)[0] == ["fc.weight"]
    assert floor_after(run(), others)[ComparedPlace(2, PlaceKind.WEIGHT, "key")] == pytest.approx(0.2)


def test_a_weight_with_such_a_gradient_may_differ_by_as_much_as_it_moved() -> None:
    """Although in this disturbed run Adam happened to step the same way."""
    others = [floors.differences(run(), disturbed(key=0.1))]
    assert floor_after(run(), others)[ComparedPlace(2, PlaceKind.WEIGHT, "key")] == 0.1


def test_a_parameter_that_got_no_gradient_is_neither_real_nor_noise() -> None:
    without = [{"key": sketches["key"]} for sketches in run().gradients]
    reference = run(gradients=without)
    others = [floors.differences(reference, reference)]
    assert floors.real_and_noise(reference, others)[1] == []
    assert floors.real_and_noise(reference, others)[0] == ["key"]


def test_differences_in_proportion_to_the_floor() -> None:
    times = floors.times(floors.differences(run(), scaled(1 + 1e-6)), floor_of(4))
    top = floors.worst(times)
    assert top.kind is PlaceKind.GRADIENT
    assert times[top] == pytest.approx(1e-6 / (4 * EPS), rel=0.01)
    assert times[WEIGHT] == 0


def test_nothing_is_worse_than_what_is_not_a_number() -> None:
    other = run(weights=run().weights | {"fc.weight": vector(NAN, 2.0)})
    times = floors.times(floors.differences(run(), other), floor_of(4))
    assert floors.worst(times) == WEIGHT
