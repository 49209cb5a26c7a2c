"""Optimizers that look at whole weights, under divided models, against one device, in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from evener.components.optim import whole_updates
from evener.components.optim.owners import update_cost
from evener.components.optim.whole_updates import STATE_FACTOR
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, EvenerError
from evener.strategies import whole_matrices
from evener.strategies.description import describe
from evener.strategies.local_steps.strategies import LocalSgd
from evener.strategies.pipeline.pipeline import Pipeline
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.tensor.tensor import TensorParallel
from evener.tools.verify import Trajectory, record
from evener.training.engine import Engine
from tests.comparing import handed_on, trained_by_hand, worst
from tests.strategies import whole_tasks
from tests.strategies.whole_tasks import WORDS
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed, spread

PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 1": (3, {"strategy": Sharded(zero=1, in_common=True)}),
    "zero 2": (2, {"strategy": Sharded(zero=2, shard_sizes="3,1")}),
    "zero 3": (3, {"strategy": Sharded(zero=3)}),
    "tensor": (2, {"strategy": "tensor", "balance": "2,1"}),
    "features of shards": (4, {"strategy": (Sharded(), TensorParallel()), "mesh": "shard=2,tensor=2"}),
    "features of owners": (4, {"strategy": (Sharded(zero=2), TensorParallel()), "mesh": "shard=2,tensor=2"}),
    "replicas of shards": (4, {"strategy": "sharded", "mesh": "data=2,shard=2"}),
}


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual: dict[str, Any] = {"dtype": "float64", "device": "cpu", "steps": 5}
    place = name if ":" in name else f"tests.strategies.whole_tasks:{name}"
    return record(place, None, RunConfig(**(usual | settings)), environment)


def compared(ranks: Any, size: int, name: str, settings: dict[str, Any]) -> None:
    alike = {"balance": "equal", "strategy": "single", "mesh": None}
    reference = trajectory(name, Environment(), **(settings | alike))
    divided = ranks(size).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


NAMES = ("muon", "shampoo", "adafactor", "mixed")
MAIN = [*PLACES][:4]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *crossed(["muon", "shampoo"], MAIN, lambda _: (ALWAYS, SLOW)),
        *crossed(["adafactor", "mixed"], MAIN, lambda _: (ALWAYS, SLOW)),
        *crossed(NAMES, [*PLACES][4:], lambda _: (SLOW, NIGHTLY)),
    ],
)
def test_the_update_is_that_of_one_device(ranks: Any, name: str, place: str) -> None:
    size, settings = PLACES[place]
    compared(ranks, size, name, settings | {"clip_norm": 0.5})


STAGES_OF_OWNERS = {"strategy": (Pipeline(), Sharded(zero=2)), "mesh": "shard=2"}


@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        ("pipeline.test_pipeline:whole_weights", 2, {"strategy": "pipeline"}),
        ("test_experts:whole_weights", 3, {"strategy": "experts"}),
        ("test_features:whole_weights", 3, {"strategy": "dimension"}),
        pytest.param("pipeline.test_pipeline:whole_weights", 4, STAGES_OF_OWNERS, marks=pytest.mark.slow),
    ],
)
def test_other_divisions_update_whole_weights_too(
    ranks: Any, name: str, size: int, settings: dict[str, Any]
) -> None:
    compared(ranks, size, f"tests.strategies.{name}", settings)


def test_a_division_that_cuts_what_is_looked_at_would_be_seen(ranks: Any) -> None:
    reference = trajectory("shampoo", Environment(), strategy="single")
    divided = ranks(2).run(trajectory, "lying", strategy=Sharded(zero=2))
    assert worst(reference.weights, divided[0].weights) > 1e-3


@pytest.mark.parametrize("name", spread(NAMES, SLOW, ALWAYS, SLOW, SLOW))
def test_checkpoints_go_from_place_to_place(ranks: Any, name: str) -> None:
    places = [*PLACES.values()][:4]
    route = [places[1], places[0], (1, {"strategy": "single"}), places[2], places[3], places[2]]
    found = handed_on(ranks, getattr(whole_tasks, name), route, [1, 3, 4, 6, 7, 9])
    (expected,) = handed_on(ranks, getattr(whole_tasks, name), [(1, {"strategy": "single"})], [9])
    for state in found:
        assert worst(expected["model"], state["model"]) <= 1e-11
        flat, own = (dict(leaves([one["optimizer"]["state"], one["average"]])) for one in (expected, state))
        assert worst(flat, own) <= 1e-9


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor | int | float):
        yield name, torch.as_tensor(value, dtype=torch.float64)
    else:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in pairs:
            yield from leaves(entry, f"{name}/{key}")


def total(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, targets, reduction="sum")


@pytest.mark.parametrize("place", spread(["zero 2", "zero 3", "tensor"], ALWAYS, ALWAYS, SLOW))
def test_a_loop_of_the_users_own_takes_the_same_steps(ranks: Any, place: str) -> None:
    reference = trained_by_hand(whole_tasks.shampoo, total, len, strategy="single")
    size, settings = PLACES[place]
    for weights in ranks(size).run(trained_by_hand, whole_tasks.shampoo, total, len, **settings):
        assert worst(reference, weights) <= 1e-11


def frozen_later(strategy: Any) -> dict[str, torch.Tensor]:
    """Freezes a layer for some steps."""
    config = RunConfig(device="cpu", dtype="float64", strategy=strategy, steps=6)
    with Engine(whole_tasks.shampoo(), config) as engine:
        for batch in engine.batches():
            if engine.steps_done in (2, 4):
                engine.model.get_submodule("up").requires_grad_(engine.steps_done == 4)
            engine.step(batch)
        return {name: value.detach().clone() for name, value in engine.learner.tensors().items()}


def test_a_layer_may_be_frozen_for_a_while(ranks: Any) -> None:
    for weights in ranks(2).run(frozen_later, "tensor"):
        assert worst(frozen_later("single"), weights) <= 1e-11


@pytest.mark.parametrize("place", ["zero 2", "tensor"])
def test_state_of_owners_may_be_offloaded_and_that_of_gathered_weights_not(
    ranks: Any, place: str, tmp_path: Path
) -> None:
    size, settings = PLACES[place]
    more = {"offload": "optimizer", "offload_to": tmp_path}
    if place == "zero 2":
        compared(ranks, size, "wide_muon", settings | more)
    else:
        (message, *_) = ranks(size).run(refused, "muon", **settings, **more)
        assert "does not go with offload optimizer, unless owners hold whole weights" in message


def test_groups_may_be_updated_by_elements(ranks: Any) -> None:
    for zero in (2, 3):
        compared(ranks, 2, "mixed_by_group", {"strategy": Sharded(zero=zero)})


# Who owns what


def owned(name: str, **settings: Any) -> tuple[float, int]:
    """The cost of what this rank updates, and the largest message of an update in bytes."""
    largest, real = 0, whole_updates.start_exchange

    def spied(group: Any, outgoing: Any, incoming: Any, device: Any) -> Any:
        nonlocal largest
        sizes = [math.prod(shape) * dtype.itemsize for forms in incoming for shape, dtype in forms]
        largest = max(largest, sum(sizes))
        return real(group, outgoing, incoming, device)

    config = RunConfig(device="cpu", dtype="float64", steps=2, **settings)
    with Engine(getattr(whole_tasks, name)(), config) as engine:
        with mock.patch.object(whole_updates, "start_exchange", spied):
            for batch in engine.batches():
                engine.step(batch)
        here = engine.learner.held_state().whole_updates
        shapes = {name: tuple(value.shape) for name, value in engine.learner.tensors().items()}
        return sum(update_cost(shapes[name]) for name, is_here in here.items() if is_here), largest


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": Sharded(zero=2), "throttle": "1,0.25"},
        {"strategy": Sharded(zero=1, shard_sizes="4,1")},
        {"strategy": Sharded(zero=3), "throttle": "1,0.25"},
    ],
    ids=["speeds", "sizes", "speeds of shards"],
)
def test_a_rank_of_a_quarter_of_the_speed_updates_a_quarter_as_much(
    ranks: Any, settings: dict[str, Any]
) -> None:
    (fast, _), (slow, _) = ranks(2).run(owned, "wide_muon", **settings)
    assert fast / slow == pytest.approx(4, rel=0.15)


def measured(fast: int, zero: int) -> float:
    """The cost of what this rank updates, where rank ``fast`` finds that it has four times the speed."""
    place, speed = (
        lambda learner: learner.session.rank,
        lambda learner: 4.1 if place(learner) == fast else 1.0,
    )
    with mock.patch.multiple(whole_matrices, _place=place, _speed=speed):
        return owned("wide_muon", strategy=Sharded(zero=zero))[0]


def test_ranks_on_unlike_devices_measure_their_speed(ranks: Any) -> None:
    for zero in (2, 3):
        slow, fast = ranks(2).run(measured, 1, zero)
        assert fast / slow == pytest.approx(4, rel=0.15)


def crowded(zero: int) -> float:
    """The cost of what this rank updates, where rank 0 has memory for two matrices of 13 besides its pieces."""
    pieces = 2 * 8 * (12 * 24 * 24 + 24 * WORDS + 24 * WORDS) / (1 if zero < 3 else 2)
    memory = lambda learner: math.inf if learner.session.rank else pieces + 2.5 * STATE_FACTOR * 8 * 24 * 24  # noqa: E731
    with mock.patch.object(whole_matrices, "_memory", memory):
        return owned("wide_muon", strategy=Sharded(zero=zero))[0]


def test_a_rank_owns_no_more_than_it_has_memory_for(ranks: Any) -> None:
    for zero in (2, 3):
        little, much = ranks(2).run(crowded, zero)
        assert little >= 2 * update_cost((24, 24))
        assert little < 0.3 * much


def recorded(**settings: Any) -> str:
    with Engine(whole_tasks.muon(), RunConfig(device="cpu", steps=1, **settings)) as engine:
        return describe(engine.learner)["optimizer"]


def test_records_say_how_weights_are_updated(ranks: Any) -> None:
    whole = "optimizer Muon, updates 6 weights whole, each at one rank"
    assert set(ranks(2).run(recorded, strategy=Sharded(zero=2))) == {whole}
    assert set(ranks(2).run(recorded, strategy="sharded")) == {f"{whole}, 6 of them gathered for it"}
    assert recorded(strategy="single") == ""


def test_matrices_are_gathered_one_at_a_time_if_the_optimizer_allows(ranks: Any) -> None:
    largest = 2 * 8 * 24 * 24  # weight and gradient, in float64
    for _, nbytes in ranks(2).run(owned, "wide_muon", strategy=Sharded(zero=3)):
        assert nbytes == largest
    (_, together), _ = ranks(2).run(owned, "wide_shampoo", strategy=Sharded(zero=3))
    assert together > 3 * largest


# What is refused


def refused(name: str, **settings: Any) -> str:
    with pytest.raises(EvenerError) as caught:
        trajectory(name, **settings)
    assert caught.type is ConfigurationError
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "of_all",
            {"strategy": Sharded(zero=2)},
            "OfAll looks at several weights at once, .*use strategy 'ddp'",
        ),
        ("reading", {"strategy": "sharded"}, "Reading may look at a weight as a whole, .*elementwise = True"),
        (
            "shampoo",
            {"strategy": "sharded", "update_in_backward": True},
            "does not go with update_in_backward",
        ),
        ("shampoo", {"strategy": LocalSgd(replicas=1, zero=2)}, "with zero=2 holds a slice; use zero=0"),
    ],
)
def test_what_cannot_be_is_refused(ranks: Any, name: str, settings: dict[str, Any], words: str) -> None:
    for message in ranks(2).run(refused, name, **settings):
        assert re.search(words, message), message


def own_optimizer() -> str:
    config = RunConfig(device="cpu", strategy=Sharded(zero=2), steps=1)
    with Engine(whole_tasks.shampoo(), config) as engine:
        mine = whole_tasks.Shampoo(engine.model.parameters())
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            engine.backward(total(engine.model(micro.inputs), micro.targets), len(micro.targets))
            with pytest.raises(ConfigurationError) as caught:
                engine.update(mine)
    return str(caught.value)


def test_an_optimizer_of_pieces_is_refused_in_a_loop_of_the_users_own(ranks: Any) -> None:
    for message in ranks(2).run(own_optimizer):
        assert "Shampoo may look at a weight as a whole" in message
