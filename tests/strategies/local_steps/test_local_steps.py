"""Local SGD and DiLoCo against what they come to: ddp, Nesterov, plain training, and themselves on other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.components.sharded_tensor.local import local
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import DivergenceError
from evener.strategies import DiLoCo, LocalSgd
from evener.tools.verify import verify
from evener.training.engine import Engine
from tests.comparing import handed_on, worst
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed

ROUNDING = 1e-9
SAMPLES, IGNORED = 130, -100


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 3, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 4, (SAMPLES, 3), generator=generator)
    targets[torch.rand(SAMPLES, 3, generator=generator) < 0.4] = IGNORED  # replicas differ in their terms
    return TensorDataset(inputs, targets)


class Words(nn.Module):
    def __init__(self, normalized: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12, bias=False), nn.Linear(12, 4)
        self.norm = nn.BatchNorm1d(12) if normalized else nn.Identity()

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(words).flatten(0, 1))))


class Turning(Words):
    """With complex weights."""

    def __init__(self) -> None:
        super().__init__(False)
        turns = torch.randn(12, dtype=torch.complex128, generator=torch.Generator().manual_seed(2))
        self.turns = nn.Parameter(turns)

    def forward(self, words: Tensor) -> Tensor:
        made = self.first(words).flatten(0, 1)
        return self.last(torch.tanh((made * self.turns).real + (made * self.turns).imag))


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Terms:
    def count(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    total = staticmethod(total)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2 * 0.7, momentum=0.9, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def task(optimizer: Callable[[Any], Any] = sgd, normalized: bool = False, **more: Any) -> Task:
    usual = {"model": partial(Words, normalized), "train": samples(), "loss": Terms(), "batch_size": 12}
    return Task(optimizer=optimizer, **usual | more)


def everything() -> Task:
    return task(adam, True, scheduler=decaying, scheduler_interval="step")


def trained(build: Callable[[], Task], settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    config = RunConfig(**{"device": "cpu", "dtype": "float64", "epochs": 2} | dict(settings))
    with Engine(build(), config) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        return {name: value.clone() for name, value in engine.learner.tensors().items()}, losses


def on(ranks: Any, size: int, build: Callable[[], Task], **settings: Any) -> dict[str, Tensor]:
    """The weights after training on ``size`` ranks, which all have the same."""
    found = [weights for weights, _ in ranks(size).run(trained, build, settings)]
    assert all(worst(found[0], other) == 0 for other in found)
    return found[0]


@pytest.mark.parametrize("build", [task, partial(task, model=Turning)], ids=["real", "complex"])
@pytest.mark.parametrize("balance", ["1,1", "3,1"])
def test_merging_after_each_batch_is_data_parallelism(
    ranks: Any, balance: str, build: Callable[[], Task]
) -> None:
    local = on(ranks, 2, build, strategy=LocalSgd(sync_every=1), balance=balance)
    assert worst(on(ranks, 2, build, strategy="ddp"), local) < ROUNDING


def test_an_outer_step_after_each_batch_is_nesterovs_method(ranks: Any) -> None:
    local = on(ranks, 2, task, strategy=DiLoCo(sync_every=1))
    assert worst(on(ranks, 1, partial(task, nesterov), strategy="single"), local) < ROUNDING


@pytest.mark.parametrize(
    "strategy", [LocalSgd(sync_every=4), DiLoCo(sync_every=4, outer_lr=1.0, outer_momentum=0.0)]
)
def test_one_replica_without_an_outer_step_is_plain_training(ranks: Any, strategy: LocalSgd) -> None:
    plain, _ = trained(everything, {"strategy": "single"})
    local, _ = trained(everything, {"strategy": strategy})
    assert worst(plain, local) < ROUNDING


def sgd_with_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.2, dtype=torch.float64))


def test_replicas_of_a_rank_have_rates_of_their_own_also_as_tensors() -> None:
    """A scheduler writes into a rate that is a tensor."""
    settings = {"strategy": LocalSgd(sync_every=4, replicas=2)}
    scheduled = {"scheduler": decaying, "scheduler_interval": "step"}
    number, _ = trained(partial(task, **scheduled), settings)
    found, _ = trained(partial(task, sgd_with_a_tensor, **scheduled), settings)
    assert worst(number, found) < ROUNDING


def test_warm_up_alone_is_data_parallelism(ranks: Any) -> None:
    build = partial(task, adam, scheduler=decaying, scheduler_interval="step")
    local = on(ranks, 2, build, strategy=LocalSgd(sync_every=4, warmup_steps=100), balance="3,1")
    assert worst(on(ranks, 2, build, strategy="ddp"), local) < ROUNDING


WAYS = {
    "plain": {"strategy": DiLoCo(sync_every=4, replicas=3)},
    "fragments": {
        "strategy": DiLoCo(
            sync_every=6, replicas=3, num_fragments=3, fragment_sync_delay=1, fragment_update_alpha=0.3
        )
    },
    "warm-up": {"strategy": LocalSgd(sync_every=4, replicas=3, warmup_steps=6)},
    "shares": {
        "strategy": DiLoCo(sync_every=3, replicas=3),
        "balance": "3,1,0",
        "micro_batch": 9,
        "clip_norm": 0.1,
    },
}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=NIGHTLY)])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_replicas_on_other_ranks_are_the_same_training(ranks: Any, way: str, size: int) -> None:
    alone, losses = trained(everything, WAYS[way])
    found, elsewhere = ranks(size).run(trained, everything, WAYS[way])[0]
    assert worst(alone, found) < 1e-7  # Adam makes full steps of rounding
    assert losses == pytest.approx(elsewhere, rel=1e-7)


TEAMS: dict[str, dict[str, Any]] = {
    "plain": {"strategy": DiLoCo(sync_every=4, replicas=2)},
    "fragments": {
        "strategy": DiLoCo(
            sync_every=6, replicas=2, num_fragments=3, fragment_sync_delay=1, fragment_update_alpha=0.3
        )
    },
    "warm-up": {"strategy": LocalSgd(sync_every=4, replicas=2, warmup_steps=6)},
    "shares": {"strategy": DiLoCo(sync_every=4, replicas=2), "steps": 8},
    "passes": {"strategy": DiLoCo(sync_every=3, replicas=2), "micro_batch": 5, "clip_norm": 0.1},
    "one": {"strategy": DiLoCo(sync_every=3, replicas=1)},
}
SHARES = {"shares": ("3,1", "5,1,0,2"), "one": (None, "3,1,0,4")}
"""Shares of two replicas, and of ranks that compute them in pairs."""


def in_short(way: str) -> dict[str, Any]:
    """Two rounds at least, beyond the first epoch of 11 batches, and the begin of another round."""
    return {"steps": 14} | TEAMS[way]


@cache
def trained_alone(way: str) -> tuple[dict[str, Tensor], list[float]]:
    """One rank that computes all replicas."""
    return trained(everything, in_short(way) | {"balance": SHARES.get(way, ("1,1", ""))[0]})


@pytest.mark.parametrize("way", TEAMS)
def test_ranks_that_compute_a_replica_together_are_the_same_training(ranks: Any, way: str) -> None:
    _, of_ranks = SHARES.get(way, ("", "3,1,0,4"))
    alone, losses = trained_alone(way)
    for found, elsewhere in ranks(4).run(trained, everything, in_short(way) | {"balance": of_ranks}):
        assert worst(alone, found) < 1e-7
        assert losses == pytest.approx(elsewhere, rel=1e-7)


@pytest.mark.parametrize(("way", "zero"), crossed(TEAMS, [2, 3, 1], lambda _: (ALWAYS, SLOW, NIGHTLY)))
def test_they_may_divide_its_state(ranks: Any, way: str, zero: int) -> None:
    _, of_ranks = SHARES.get(way, ("", "3,1,0,4"))
    alone, losses = trained_alone(way)
    divided = {"strategy": replace(TEAMS[way]["strategy"], zero=zero), "balance": of_ranks}
    for found, elsewhere in ranks(4).run(trained, everything, in_short(way) | divided):
        assert worst(alone, found) < 1e-7
        assert losses == pytest.approx(elsewhere, rel=1e-7)


@pytest.mark.parametrize("way", ["fragments", "shares", "teams"])
def test_other_ranks_go_on_from_a_checkpoint(ranks: Any, way: str) -> None:
    settings, sizes = (TEAMS["fragments"], (4, 1, 2)) if way == "teams" else (WAYS[way], (2, 1, 3))
    whole = on(ranks, 1, everything, **settings)
    rounds = 8 if way == "shares" else 4
    equal = {"balance": "1,1"} if way == "teams" else {}
    balances = {4: {"balance": "3,1,0,4"}}
    places = [(size, {"epochs": 2} | settings | balances.get(size, equal)) for size in sizes]
    sync_every = settings["strategy"].sync_every
    legs = [2 * sync_every, 3 * sync_every, rounds * sync_every]
    states = handed_on(ranks, everything, places, legs)
    assert all(worst(whole, _named(state, whole)) < 1e-7 for state in states)


class Estimating(torch.optim.SGD):
    """Keeps in its groups an estimate and a count that each step changes, as Prodigy does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0] |= {"estimate": 1.0, "count": 0}

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["estimate"] += sum(float(p.grad.square().sum()) for p in group["params"])
        group["count"] += 1
        for parameter in group["params"]:
            parameter.grad /= group["estimate"] * (1 + 0.1 * group["count"])
        return super().step(closure)


def test_options_that_each_replica_s_steps_change_are_its_own_after_a_checkpoint(ranks: Any) -> None:
    build, settings = partial(task, Estimating), {"strategy": LocalSgd(sync_every=4), "balance": "3,1"}
    whole = on(ranks, 2, build, **settings)
    state = handed_on(ranks, build, [(2, {"epochs": 2} | settings)] * 2, [8, 24])[-1]
    assert worst(whole, _named(state, whole)) < ROUNDING


def _lengths(compress: str | None) -> list[tuple[int, float]]:
    """The size of each round, and how far its merge went."""
    settings: dict[str, Any] = {"strategy": LocalSgd(sync_every=10), "epochs": 3, "compress": compress}
    with Engine(task(), RunConfig(device="cpu", dtype="float64", **settings)) as engine:
        parameters, found = list(engine.model.parameters()), []
        before = nn.utils.parameters_to_vector(parameters).detach()
        for batch in engine.batches():
            engine.step(batch)
            after = nn.utils.parameters_to_vector(parameters).detach()
            found.append((batch.size, float((after - before).norm())))
            before = after
        return found


def test_what_compression_kept_of_a_merge_weighs_no_more_in_a_shorter_round(ranks: Any) -> None:
    found = ranks(2).run(_lengths, "top-k")[0]
    assert [size for size, _ in found] == [120, 10] * 3
    assert max(length for size, length in found if size == 10) < 2 * max(
        length for size, length in found if size == 120
    )


class Odd(nn.Module):
    """Has tied, frozen and unused weights, and scalars. A rank's rows are not the same part of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.frozen = nn.Embedding(20, 8), nn.Linear(8, 7), nn.Linear(7, 8)
        self.frozen.requires_grad_(False)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(1))
        self.unused, self.last = nn.Linear(3, 3), nn.Linear(8, 20, bias=False)
        self.last.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        mean = self.words(words).mean(1) * self.scale + self.shift
        return self.last(torch.tanh(self.frozen(self.first(mean))))


def trainable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.02)


def odd() -> Task:
    words = torch.randint(0, 20, (SAMPLES, 5), generator=torch.Generator().manual_seed(3))
    data = TensorDataset(words, words.sum(1) % 20)
    return Task(model=Odd, train=data, loss=nn.CrossEntropyLoss(), optimizer=trainable, batch_size=12)


@pytest.mark.parametrize(
    ("way", "zero"), crossed(["fragments", "warm-up"], [1, 3], lambda _: (ALWAYS, NIGHTLY))
)
def test_so_may_a_model_whose_weights_are_of_all_kinds(ranks: Any, way: str, zero: int) -> None:
    alone, losses = trained(odd, TEAMS[way] | {"balance": "1,1"})
    divided = {"strategy": replace(TEAMS[way]["strategy"], zero=zero), "balance": "3,1,0,4"}
    for found, elsewhere in ranks(4).run(trained, odd, TEAMS[way] | divided):
        assert worst(alone, found) < 1e-7
        assert losses == pytest.approx(elsewhere, rel=1e-7)


@pytest.mark.parametrize(
    ("way", "stages"), crossed(["fragments", "plain"], [(2, 0, 3), (3, 1, 0)], lambda _: (ALWAYS, NIGHTLY))
)
def test_divided_replicas_go_on_from_a_checkpoint(ranks: Any, way: str, stages: tuple[int, ...]) -> None:
    usual = TEAMS[way] | {"epochs": 2}
    whole = on(ranks, 1, everything, **TEAMS[way])
    places = [
        (4, usual | {"balance": "3,1,0,4", "strategy": replace(usual["strategy"], zero=zero)})
        for zero in stages
    ]
    every = usual["strategy"].sync_every
    states = handed_on(ranks, everything, [*places, (2, usual)], [every, 2 * every, 3 * every, 22])
    assert all(worst(whole, _named(state, whole)) < 1e-7 for state in states)


def _held_elements(settings: Mapping[str, Any]) -> tuple[int, int]:
    """The elements of the weights that the optimizer updates here, and of the outer momentum."""
    with Engine(everything(), RunConfig(device="cpu", dtype="float64", steps=4, **settings)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        outer = engine.learner.stepper.outer
        assert outer is not None
        momenta = [local(entries["momentum_buffer"]) for entries in outer.state.values()]
        weights = [local(p) for p in engine.model.parameters()]
        return sum(each.numel() for each in weights), sum(each.numel() for each in momenta)


def test_each_rank_holds_its_part_of_a_divided_replica(ranks: Any) -> None:
    settings = {"strategy": DiLoCo(sync_every=4, replicas=2, zero=2), "balance": "1,1,1,1"}
    size = sum(p.numel() for p in everything().model().parameters())
    found = ranks(4).run(_held_elements, settings)
    assert all(weights == momenta for weights, momenta in found)
    assert [sum(weights for weights, _ in pair) for pair in (found[:2], found[2:])] == [size, size]
    assert max(weights for weights, _ in found) < 0.7 * size


def _named(state: dict[str, Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: state["model"][name] for name in like}


def _kept_in_memory(settings: Mapping[str, Any]) -> float:
    config = RunConfig(**{"device": "cpu", "dtype": "float64", "epochs": 2} | dict(settings))
    with Engine(everything(), config) as engine:
        for number, batch in enumerate(engine.batches()):
            engine.step(batch)
            if number == 1:
                state = engine.state_dict()
                break
    with Engine(everything(), config) as engine:
        engine.load_state_dict(state)
        for batch in engine.batches():
            engine.step(batch)
        found = {name: value.clone() for name, value in engine.learner.tensors().items()}
    whole, _ = trained(everything, settings)
    return worst(whole, found)


def test_a_state_in_memory_holds_all_replicas(ranks: Any) -> None:
    assert max(ranks(2).run(_kept_in_memory, WAYS["fragments"])) < 1e-7


def _goes_on_with(strategy: Any, state: dict[str, Any]) -> int:
    config = RunConfig(device="cpu", dtype="float64", epochs=2, strategy=strategy)
    with Engine(everything(), config) as engine:
        engine.load_state_dict(state)
        return len([engine.step(batch).loss for batch in engine.batches()])


def test_data_parallelism_goes_on_from_local_steps_and_the_other_way_round(ranks: Any) -> None:
    def saved(strategy: Any) -> dict[str, Any]:
        with Engine(
            everything(), RunConfig(device="cpu", dtype="float64", epochs=2, strategy=strategy)
        ) as engine:
            for batch in engine.batches():
                engine.step(batch)
                return engine.state_dict()
        raise AssertionError("no batch")

    assert _goes_on_with("single", saved(WAYS["fragments"]["strategy"])) == 22 - 6
    assert _goes_on_with(WAYS["plain"]["strategy"], saved("single")) == 3 + 3
    assert _goes_on_with(DiLoCo(replicas=2, sync_every=4), saved(WAYS["plain"]["strategy"])) == 2 + 3


class Pooled(nn.Module):
    """A BatchNorm whose running moments are those of its last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(2, momentum=1.0), nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("kind", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.copy_(images.mean())
            self.kind.fill_(int(images[0, 0, 0, 0] * 1000))
        return self.last(self.norm(images).mean((2, 3)))


def pictures(model: Callable[[], nn.Module], data: Tensor, batch_size: int) -> Task:
    return Task(
        model=model,
        train=TensorDataset(data, torch.zeros(len(data), 1, dtype=torch.float64)),
        loss=nn.MSELoss(),
        optimizer=sgd,
        batch_size=batch_size,
        order=lambda epoch: torch.arange(len(data)),
    )


def images() -> Task:
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(16, 2, 3, 3, generator=generator, dtype=torch.float64)
    return pictures(Pooled, data + torch.arange(16).view(-1, 1, 1, 1), 16)  # the replicas' means lie apart


def test_running_moments_are_those_of_all_samples_together(ranks: Any) -> None:
    settings = {"strategy": LocalSgd(sync_every=1), "balance": "3,1", "epochs": 1}
    found = on(ranks, 2, images, **settings)
    data = images().train[:][0]
    assert torch.allclose(found["norm.running_mean"], data.mean((0, 2, 3)), rtol=1e-12)
    assert torch.allclose(found["norm.running_var"], data.var((0, 2, 3)), rtol=1e-12)
    assert found["norm.num_batches_tracked"] == 2
    assert found["seen"] == pytest.approx(float(data.mean()), rel=1e-12)
    assert found["kind"] == int(data[0, 0, 0, 0] * 1000)


def test_verify_compares_with_one_device_that_carries_all_replicas(warm: Any) -> None:
    found = verify(everything, strategy=DiLoCo(sync_every=3), processes=2, balance="3,1", steps=9)
    assert found.passed
    assert found.reordered
    assert (found.steps, found.batch_size) == (3, 36)


def test_verify_fails_for_other_weights_of_the_replicas(warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.strategies.local_steps.strategies.LocalSgd.on_one_device", _plain_mean)
    assert not verify(everything, strategy=DiLoCo(sync_every=3), processes=2, balance="3,1", steps=9).passed


def _plain_mean(strategy: LocalSgd, processes: int) -> LocalSgd:
    return LocalSgd(sync_every=strategy.sync_every, replicas=processes)


def _records() -> list[Any]:
    config = RunConfig(device="cpu", dtype="float64", epochs=1, strategy=DiLoCo(sync_every=4, replicas=3))
    with Engine(task(), config) as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
        assert engine.learner.replicas is not None
        return [step.record() for step in steps]


def test_records_count_samples_by_rank_and_say_how_far_replicas_were_apart(ranks: Any) -> None:
    first = ranks(2).run(_records)[0][0]
    assert (first.samples, first.shares) == (48, (32, 16))
    assert len(first.merge_spread) == 1
    assert 0 < first.merge_spread[0] < 10


def _merge_bytes(settings: Mapping[str, Any]) -> int:
    """Bytes of a merge."""
    config = RunConfig(device="cpu", dtype="float64", steps=4, **settings)
    with Engine(task(), config) as engine:
        (found,) = [engine.step(batch).record().merge_bytes for batch in engine.batches()]
        return found


def test_records_count_the_bytes_of_merges_as_they_are_sent(ranks: Any) -> None:
    size = sum(p.numel() for p in task().model().parameters())
    local = LocalSgd(sync_every=4)
    assert ranks(2).run(_merge_bytes, {"strategy": local}) == [8 * size] * 2
    # A byte for each number, in blocks of 256, with a float each.
    assert ranks(2).run(_merge_bytes, {"strategy": local, "compress": "int8"}) == [256 + 4] * 2
    divided = {"strategy": replace(local, replicas=2, zero=1), "balance": "1,1,1,1"}
    parts = ranks(4).run(_merge_bytes, divided)
    assert parts[:2] == parts[2:]
    assert sum(parts[:2]) == 8 * size
    assert _merge_bytes({"strategy": local}) == 0


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images) * images[:, :1]


def broken(bad: float) -> Task:
    data = torch.ones(16, 2, dtype=torch.float64)
    data[13] = bad
    return pictures(Bad, data, 4)


def _diverging() -> tuple[str, bool]:
    with Engine(
        broken(math.nan), RunConfig(device="cpu", strategy=LocalSgd(sync_every=4), dtype="float64")
    ) as engine:
        before = {name: value.clone() for name, value in engine.learner.tensors().items()}
        try:
            for batch in engine.batches():
                engine.step(batch)
        except DivergenceError as error:
            return str(error), worst(before, engine.learner.tensors()) == 0
    return "", False


def test_a_replica_that_diverges_is_not_merged_and_its_rank_is_named(ranks: Any) -> None:
    for words, is_kept in ranks(2).run(_diverging):
        assert "step 0 on rank 1" in words
        assert is_kept


def nothing_counts() -> Task:
    data = samples()
    data.tensors[1].fill_(IGNORED)
    return task(adam, train=data)


def test_a_round_in_which_nothing_counts_changes_nothing(ranks: Any) -> None:
    with Engine(nothing_counts(), RunConfig(device="cpu", dtype="float64")) as engine:
        before = {name: value.clone() for name, value in engine.learner.tensors().items()}
    settings = {"strategy": LocalSgd(sync_every=4), "balance": "3,1", "epochs": 1}
    assert worst(before, on(ranks, 2, nothing_counts, **settings)) == 0
