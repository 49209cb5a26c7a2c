from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balance.layer_partition import partition_layers
from evener.errors import ConfigurationError


def stage_seconds(
    layers: range, seconds: Sequence[float], speed: float, boundary_seconds: Sequence[float]
) -> float:
    """Time of one stage: its layers, and the transfer at each of its ends that another stage borders on."""
    ends = [cut for cut in (layers.start, layers.stop) if 0 < cut < len(seconds)]
    return sum(seconds[layer] for layer in layers) / speed + sum(boundary_seconds[cut - 1] for cut in ends)


def bottleneck(stages: list[range], seconds: list[int], speeds: list[float], cuts: list[int]) -> float:
    return max(
        stage_seconds(stage, seconds, speed, cuts) for stage, speed in zip(stages, speeds, strict=True)
    )


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[int], list[float], list[int]]:
    seconds = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    cuts = draw(st.lists(st.integers(0, 9), min_size=len(seconds) - 1, max_size=len(seconds) - 1))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=len(seconds)))
    return seconds, speeds, cuts


@given(pipelines())
def test_no_other_cuts_are_faster(pipeline: tuple[list[int], list[float], list[int]]) -> None:
    seconds, speeds, cuts = pipeline
    stages = partition_layers(seconds, speeds, cuts)
    assert [layer for stage in stages for layer in stage] == list(range(len(seconds)))
    assert all(stages)
    every = [
        [range(*ends) for ends in zip((0, *inner), (*inner, len(seconds)), strict=True)]
        for inner in combinations(range(1, len(seconds)), len(speeds) - 1)
    ]
    best = min(bottleneck(other, seconds, speeds, cuts) for other in every)
    assert bottleneck(stages, seconds, speeds, cuts) == best


@given(pipelines(), st.data())
def test_no_other_cuts_that_fit_are_faster(
    pipeline: tuple[list[int], list[float], list[int]], data: st.DataObject
) -> None:
    seconds, speeds, cuts = pipeline
    nbytes = data.draw(st.lists(st.integers(0, 9), min_size=len(seconds), max_size=len(seconds)))
    limits = data.draw(st.lists(st.integers(0, 30), min_size=len(speeds), max_size=len(speeds)))
    every = [
        [range(*ends) for ends in zip((0, *inner), (*inner, len(seconds)), strict=True)]
        for inner in combinations(range(1, len(seconds)), len(speeds) - 1)
    ]
    fitting = [
        stages
        for stages in every
        if all(sum(nbytes[i] for i in stage) <= limit for stage, limit in zip(stages, limits, strict=True))
    ]
    if not fitting:
        with pytest.raises(ConfigurationError, match="do not fit devices"):
            partition_layers(seconds, speeds, cuts, nbytes, limits)
        return
    stages = partition_layers(seconds, speeds, cuts, nbytes, limits)
    assert stages in fitting
    best = min(bottleneck(other, seconds, speeds, cuts) for other in fitting)
    assert bottleneck(stages, seconds, speeds, cuts) == best


def test_a_faster_device_takes_more_layers_and_a_dear_boundary_is_not_cut() -> None:
    assert partition_layers([1] * 6, [1, 2]) == [range(0, 2), range(2, 6)]
    assert partition_layers([1] * 6, [1, 1], [0, 0, 5, 0, 0]) == [range(0, 2), range(2, 6)]


@pytest.mark.parametrize(
    ("seconds", "speeds", "cuts", "says"),
    [
        ([1.0], [1, 1], None, "1 layers cannot be divided over 2"),
        ([], [1], [], "0 layers cannot be divided over 1"),
        ([1.0, 1.0], [1], [], "0 boundaries for 2 layers"),
        ([1.0, 1.0], [1, 0], None, "speeds"),
        ([1.0, float("nan")], [1, 1], None, "finite"),
    ],
)
def test_what_cannot_be(
    seconds: list[float], speeds: list[float], cuts: list[float] | None, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        partition_layers(seconds, speeds, cuts)
