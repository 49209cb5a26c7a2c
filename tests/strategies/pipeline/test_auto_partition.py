"""What a cut goes by: times that are noisy, ranks that are not alike, what crosses, and what they have room for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from evener.balance.throttle import Throttle
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.strategies.pipeline import auto_partition as best
from evener.strategies.pipeline.auto_partition import StageRanks, partition, seconds_and_speeds
from evener.strategies.pipeline.costs import LayerCosts


def learner(degrees: dict[str, int], throttle: Throttle | None = None) -> Any:
    return SimpleNamespace(
        mesh=SimpleNamespace(layout=Layout(degrees)), settings=SimpleNamespace(throttle=throttle)
    )


def rows(*times: list[float]) -> list[LayerCosts]:
    return [LayerCosts({f"layer {i}": each for i, each in enumerate(row)}, ()) for row in times]


def test_one_disturbed_layer_makes_no_rank_slow() -> None:
    given = rows([1.0, 1.0, 4.0, 2.0, 2.0], [1.0, 9.0, 4.0, 2.1, 2.0])
    seconds, speeds = seconds_and_speeds(given, learner({"pipeline": 2}), "pipeline")
    assert seconds == [1.0, 1.0, 4.0, 2.0, 2.0]
    assert speeds == [1.0, 1.0]


def test_a_slower_rank_is_known_and_its_times_are_taken_as_at_full_speed() -> None:
    given = rows([2.0, 4.0, 2.0], [1.0, 2.0, 1.0])
    seconds, speeds = seconds_and_speeds(given, learner({"pipeline": 2}), "pipeline")
    assert seconds == [1.0, 2.0, 1.0]
    assert speeds == [0.5, 1.0]


def test_of_several_ranks_at_a_place_the_slowest_counts() -> None:
    given = rows([1.0], [4.0], [1.0], [2.0])  # ranks 0 and 1 are at place 0, 2 and 3 at place 1
    _, speeds = seconds_and_speeds(given, learner({"pipeline": 2, "data": 2}), "pipeline")
    assert speeds == [0.25, 0.5]


def test_an_emulated_rank_is_as_slow_as_it_is_said_to_be() -> None:
    throttled = learner({"pipeline": 2}, Throttle((1.0, 0.25)))
    assert seconds_and_speeds(rows([1.0], [1.0]), throttled, "pipeline")[1] == [1.0, 0.25]


def layers(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, 1, bias=False) for width in widths))


def test_a_cut_is_where_little_crosses() -> None:
    model, names = layers(1, 1, 1, 1), ["0", "1", "2", "3"]
    free = [float("inf")] * 2
    assert partition(model, names, [1.0] * 4, [0.0] * 3, [1, 1], free) == [range(2), range(2, 4)]
    assert partition(model, names, [1.0] * 4, [0.0, 2.0, 3.0], [1, 1], free) == [range(1), range(1, 4)]


def test_a_rank_with_little_memory_gets_few_weights() -> None:
    model, names = layers(8, 8, 8, 8), ["0", "1", "2", "3"]
    speeds, limits = StageRanks((1.0, 1.0), (40.0, 1e9)).of_stages(2)
    assert partition(model, names, [1.0] * 4, [0.0] * 3, speeds, limits) == [range(1), range(1, 4)]
    with pytest.raises(ConfigurationError, match="use more devices, or smaller layers"):
        partition(model, names, [1.0] * 4, [0.0] * 3, [1.0, 1.0], [40.0, 40.0])


def test_stages_share_what_their_rank_has() -> None:
    assert StageRanks((1.0, 0.5), (8.0, 4.0)).of_stages(4) == ([1.0, 0.5, 1.0, 0.5], [4.0, 2.0, 4.0, 2.0])


def test_half_of_a_device_is_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "memory_nbytes", lambda device, ranks: 100 // ranks)
    given = learner({"pipeline": 2})
    given.session = SimpleNamespace(
        device=None,
        environment=SimpleNamespace(local_world_size=2),
        control=SimpleNamespace(gather_objects=lambda own: [own, 7.0]),
    )
    assert best.own_limits(given, "pipeline") == [25.0, 7.0]
