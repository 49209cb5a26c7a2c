from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evener.errors import ConfigurationError, TaskError
from evener.strategies.single_process.devices import parse_devices
from evener.strategies.single_process.placement import (
    Unit,
    check_together,
    computed_places,
    cut_units,
    parse_placement,
    said_places,
    units_of,
)
from evener.strategies.single_process.profile import profile

ZERO, ONE = parse_devices(["cpu:0", "cpu:1"])


class Net(nn.Module):
    """An embedding that is the head's weight too, a table of its own, and three blocks; attention calls no child."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.embed = nn.Embedding(11, 8)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.unused = nn.Linear(3, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.table
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(self.attend(x, x, x, need_weights=False)[0])
        return scores


def test_a_placement_is_names_and_devices() -> None:
    assert parse_placement("encoder=cuda:0, blocks.1?=cpu") == [
        ("encoder", torch.device("cuda:0")),
        ("blocks.1?", torch.device("cpu")),
    ]
    for wrong in ("encoder", "=cpu:0", "a=cpu:0,,b=cpu:1", "a=gpu:0"):
        with pytest.raises(ConfigurationError, match=r"encoder=cuda:0|cuda:0,cuda:1"):
            parse_placement(wrong)


def test_modules_go_with_their_parents_and_names_beat_patterns() -> None:
    places = said_places(
        Net(), parse_placement("blocks.1=cpu:0,blocks.*=cpu:1,attend=cpu:1,attend=cpu:0"), ZERO
    )
    there = {name for name, device in places.items() if device == ONE}
    assert there == {
        "blocks.0",
        "blocks.0.0",
        "blocks.0.1",
        "blocks.0.2",
        "blocks.1.0",
        "blocks.1.1",
        "blocks.1.2",
    }
    assert said_places(Net(), parse_placement("blocks=cpu:1,blocks.1=cpu:0"), ZERO)["blocks.1.2"] == ZERO


def test_a_name_that_there_is_not_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(ConfigurationError, match=r"'block.1' is no module of the model; there are blocks.1"):
        said_places(Net(), parse_placement("block.1=cpu:1"), ZERO)


def test_one_weight_on_two_devices_is_refused() -> None:
    with pytest.raises(TaskError, match=r"head.weight on cpu:1 and embed.weight on cpu:0 are one"):
        check_together(Net(), said_places(Net(), parse_placement("head=cpu:1"), ZERO))
    model = Net()
    check_together(model, said_places(model, parse_placement("head=cpu:1,embed=cpu:1"), ZERO))


def brute_force(
    units: list[Unit], speeds: list[float], memories: list[float], base: int
) -> tuple[int, int, float] | None:
    found = []
    for edges in itertools.combinations(range(1, len(units)), len(speeds) - 1):
        stops = [0, *edges, len(units)]
        parts = [units[a:b] for a, b in itertools.pairwise(stops)]
        held = [sum(u.nbytes for u in part) + (base if d == 0 else 0) for d, part in enumerate(parts)]
        if all(n <= memory for n, memory in zip(held, memories, strict=True)):
            took = sum(
                round(sum(round(u.seconds * 1e9) for u in part) * round(max(speeds) / speed, 3))
                for part, speed in zip(parts, speeds, strict=True)
            )
            full = max(n if math.isinf(m) else n / m for n, m in zip(held, memories, strict=True))
            found.append((took, sum(units[e].inputs for e in edges), full))
    return min(found, default=None)


def cost(
    units: list[Unit], chosen: list[int], speeds: list[float], memories: list[float], base: int
) -> tuple[int, int, float] | None:
    parts = [
        [unit for unit, d in zip(units, chosen, strict=True) if d == device] for device in range(len(speeds))
    ]
    assert chosen == sorted(chosen)
    assert all(parts)
    edges = [sum(map(len, parts[:d])) for d in range(1, len(parts))]
    held = [sum(u.nbytes for u in part) + (base if d == 0 else 0) for d, part in enumerate(parts)]
    took = sum(
        round(sum(round(u.seconds * 1e9) for u in part) * round(max(speeds) / speed, 3))
        for part, speed in zip(parts, speeds, strict=True)
    )
    full = max(n if math.isinf(m) else n / m for n, m in zip(held, memories, strict=True))
    return took, sum(units[e].inputs for e in edges), full


unit = st.builds(
    Unit, st.just(("x",)), st.integers(0, 5).map(lambda n: n * 1e-9), st.integers(0, 9), st.integers(0, 3)
)


memory = st.integers(1, 30) | st.just(math.inf)


@given(
    st.lists(unit, min_size=1, max_size=7),
    st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.integers(1, 30) | st.just(math.inf)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 9),
)
def test_the_cut_is_the_best_of_all(units: list[Unit], devices: list[tuple[float, float]], base: int) -> None:
    speeds, memories = ([device[i] for device in devices] for i in (0, 1))
    chosen = cut_units(units, speeds, memories, base)
    best = brute_force(units, speeds, memories, base)
    assert (None if chosen is None else cost(units, chosen, speeds, memories, base)) == best


def test_parts_are_those_that_are_called_in_the_order_of_their_calls() -> None:
    model = Net()
    seen = profile(model, lambda: model(torch.zeros(2, 5, dtype=torch.int64)))
    units, base = units_of(model, seen, 2, math.inf)
    assert [unit.names for unit in units] == [
        ("embed", "head"),
        *((f"blocks.{block}.{layer}",) for block in range(2) for layer in range(3)),
        ("attend",),
    ]
    weights = [sum(p.nbytes for p in model.get_submodule(unit.names[0]).parameters()) for unit in units]
    kept = [unit.nbytes - 4 * nbytes for unit, nbytes in zip(units, weights, strict=True)]
    assert min(kept) >= 0
    assert kept[1] == 2 * 5 * 8 * 4, "a linear layer keeps its input"
    assert base == 4 * (model.table.nbytes + sum(p.nbytes for p in model.unused.parameters()))
    assert units[1].inputs == 2 * 5 * 8 * 4
    assert all(unit.seconds > 0 for unit in units)


def test_a_profile_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    seen = profile(model, lambda: model(torch.randn(5, 3)))
    assert list(seen) == ["", "0", "1", "2"]
    assert seen[""].seconds >= seen["0"].seconds + seen["1"].seconds
    assert hooks == [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ]
    assert torch.equal(random, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("memories", "words"),
    [
        ([2000.0, 2000.0], r"takes about .* the 2 devices have 3.91 KiB together"),
        ([100.0, 1e6], r"no cut of the model's \d+ parts.* fits .*largest part"),
        ([1e9] * 12, r"has \d+ parts that can be placed apart .*fewer than 12 devices"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_bytes(memories: list[float], words: str) -> None:
    model = Net()
    seen = profile(model, lambda: model(torch.zeros(2, 5, dtype=torch.int64)))
    devices = parse_devices([f"cpu:{place}" for place in range(len(memories))])
    with pytest.raises(ConfigurationError) as caught:
        computed_places(model, seen, devices, [1.0] * len(memories), memories)
    assert re.search(words, str(caught.value)), caught.value


def test_a_large_part_is_divided_until_it_fits() -> None:
    model = nn.ModuleDict({"net": Net()})
    model.forward = lambda words: model["net"](words)
    seen = profile(model, lambda: model(torch.zeros(2, 5, dtype=torch.int64)))
    places = computed_places(model, seen, (ZERO, ONE), [1.0, 1.0], [math.inf, math.inf])
    assert {places["net.embed"], places["net.head"]} == {ZERO}
    assert ONE in places.values()


def test_a_fast_device_gets_all_that_it_may() -> None:
    units = [Unit((str(n),), 1.0, 10, 1) for n in range(6)]
    assert cut_units(units, [1.0, 3.0], [1000, 1000]) == [0, 1, 1, 1, 1, 1]
    assert cut_units(units, [1.0, 3.0], [1000, 30]) == [0, 0, 0, 1, 1, 1]
    assert cut_units(units, [1.0, 1.0], [1000, 1000]) == [0, 0, 0, 1, 1, 1], "alike devices are alike full"
