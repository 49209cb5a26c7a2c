"""Merges with a quorum, against the same merges by hand, and how replicas decide them."""

from __future__ import annotations

import copy
import random
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

from evener.core.config.run_config import RunConfig
from evener.core.records import StepRecord
from evener.core.task.task import Task
from evener.data.rounds import Rounds
from evener.errors import ConfigurationError, RankTimeoutError
from evener.strategies import DiLoCo, LocalSgd
from evener.strategies.local_steps import quorum
from evener.strategies.local_steps.merge import MergeGroup
from evener.strategies.local_steps.quorum import OpenMerges, QuorumMerges, QuorumRules
from evener.tools.verify import verify
from evener.training.engine import Engine
from tests.comparing import worst
from tests.strategies.local_steps.test_local_steps import Words, adam, everything, samples, task, total

ROUNDING = 1e-7
BATCH_SIZE = 12


class Late(Words):
    """Rank 2 sleeps before one of its passes."""

    def __init__(self, at: int, seconds: float) -> None:
        super().__init__(normalized=False)
        self.at, self.seconds, self.calls = at, seconds, 0

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and dist.get_rank() == 2:
            time.sleep(self.seconds)
        return super().forward(words)


def late(at: int, seconds: float) -> Task:
    return task(adam, model=lambda: Late(at, seconds), order=lambda epoch: torch.arange(len(samples())))


def trained(
    at: int, seconds: float, strategy: LocalSgd, balance: str
) -> tuple[dict[str, Tensor], list[StepRecord], list[str]]:
    """Trains; returns the weights, the records and what rank 2 was told."""
    config = RunConfig(device="cpu", dtype="float64", epochs=2, strategy=strategy, balance=balance)
    with warnings.catch_warnings(record=True) as told, Engine(late(at, seconds), config) as engine:
        warnings.simplefilter("always")
        records = [step.record() for step in map(engine.step, engine.batches())]
        weights = {name: value.clone() for name, value in engine.learner.tensors().items()}
    return weights, records, [str(each.message) for each in told]


class Replica:
    """A replica of the training by hand."""

    def __init__(self, model: Words) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = adam(self.model.parameters())
        self.base: list[Tensor] = []
        self.terms = 0.0

    def begin(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(value)
        self.base, self.terms = [value.clone() for value in weights], 0.0

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        terms = float((targets != -100).sum())
        self.optimizer.zero_grad()
        (total(self.model(inputs), targets) / (terms or 1.0)).backward()
        self.optimizer.step()
        self.terms += terms


def by_hand(records: Sequence[StepRecord], strategy: LocalSgd, model: Words) -> list[Tensor]:
    """The weights after the merges of ``records``."""
    inputs, targets = samples().tensors
    replicas = [Replica(model) for _ in range(3)]
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outer = strategy.outer_optimizer(_Parameters(weights))
    start = epoch = 0
    for record in records:
        start = start if record.epoch == epoch else 0
        plans = [
            Rounds(3, strategy.sync_every, BATCH_SIZE, rank, 3, merges=strategy.meet_every).plan(
                record.shares, 0
            )
            for rank in range(3)
        ]
        segments = [list(plan.segments) for plan in plans]
        for replica in replicas:
            replica.begin([w.detach() for w in weights])
        for merging in (*record.merge_ranks, None):
            who = range(3) if merging is None else merging
            for rank in who:
                mine = segments[rank] if merging is None else segments[rank][:1]
                segments[rank] = segments[rank][len(mine) :]
                for local in (each for segment in mine for each in segment.local):
                    (at,) = local.passes
                    place = slice(start + at.start, start + at.stop)
                    replicas[rank].train(inputs[place], targets[place])
            _merge([replicas[rank] for rank in who], weights, outer)
        assert not any(segments)
        start, epoch = start + sum(record.shares), record.epoch
    return weights


class _Parameters:
    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = weights

    def parameters(self) -> list[Tensor]:
        return self._weights


@torch.no_grad()
def _merge(replicas: Sequence[Replica], weights: list[Tensor], outer: torch.optim.Optimizer) -> None:
    terms = sum(replica.terms for replica in replicas)
    for place, weight in enumerate(weights):
        weight.grad = torch.zeros_like(weight)
        for replica in replicas:
            own = list(replica.model.parameters())[place]
            weight.grad += replica.terms / terms * (replica.base[place] - own)
    outer.step()
    for replica in replicas:
        replica.begin([weight.detach() for weight in weights])


DILOCO = DiLoCo(sync_every=2, quorum=2, grace=0.8, meet_every=4)


@pytest.mark.parametrize(
    ("at", "seconds", "strategy", "balance"),
    [
        (3, 1.2, DILOCO, "equal"),
        (1, 0.5, LocalSgd(sync_every=2, quorum=2, grace=0.05, meet_every=3), "3,1,2"),
    ],
    ids=["once", "never"],
)
def test_a_late_replica_comes_into_a_later_merge(
    ranks: Any, at: int, seconds: float, strategy: LocalSgd, balance: str
) -> None:
    found = ranks(3).run(trained, at, seconds, strategy, balance)
    weights, records, _ = found[0]
    assert all(worst(weights, other) == 0 for other, *_ in found)
    assert any(2 not in merging for merging in records[0].merge_ranks)
    with Engine(late(0, 0.0), RunConfig(device="cpu", dtype="float64", strategy="single")) as engine:
        model = copy.deepcopy(engine.learner.model)
    expected = by_hand(records, strategy, model)
    assert worst(dict(zip(weights, expected, strict=True)), weights) < ROUNDING
    told = [any("rank 2 came too late for all" in text for text in texts) for *_, texts in found]
    assert told == [False, False, all(2 not in merging for merging in records[0].merge_ranks)]


def destroyed() -> list[bool]:
    """Trains; returns for each group that was destroyed whether some ranks could still merge without others then."""
    found, is_open = list[bool](), False
    begin, all_ranks = QuorumMerges.begin, QuorumMerges.all_ranks

    def begun(merges: QuorumMerges, step: int) -> None:
        nonlocal is_open
        begin(merges, step)
        is_open = True

    def last(merges: QuorumMerges) -> MergeGroup:
        nonlocal is_open
        is_open = False
        return all_ranks(merges)

    def noted(group: dist.ProcessGroup) -> None:
        found.append(is_open)
        dist.destroy_process_group(group)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(QuorumMerges, "begin", begun)
        patched.setattr(QuorumMerges, "all_ranks", last)
        patched.setattr(quorum, "destroy", noted)
        trained(1, 0.5, LocalSgd(sync_every=2, quorum=2, grace=0.05, meet_every=3), "3,1,2")
    return found


def test_a_group_is_destroyed_when_all_of_its_ranks_do(ranks: Any) -> None:
    """NCCL would have those of a merge wait for a rank that has not come to it, and that waits for them."""
    found = ranks(3).run(destroyed)
    assert any(found)
    assert not any(map(any, found))


EVERY = {"strategy": DiLoCo(sync_every=2, replicas=3, quorum=3, meet_every=2)}


def test_a_quorum_of_all_replicas_is_the_same_on_any_ranks(ranks: Any) -> None:
    alone, _ = _run(EVERY)
    for size in (2, 3):
        found, records = ranks(size).run(_run, EVERY)[0]
        assert worst(alone, found) < ROUNDING
        assert [record.merge_ranks for record in records] == [(tuple(range(size)),)] * 3


def test_a_quorum_of_all_replicas_is_merging_without_one(ranks: Any) -> None:
    with_quorum, _ = ranks(2).run(_run, {"strategy": LocalSgd(sync_every=4, quorum=2, meet_every=1)})[0]
    without, _ = ranks(2).run(_run, {"strategy": LocalSgd(sync_every=4)})[0]
    assert worst(with_quorum, without) == 0


def _run(settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[StepRecord]]:
    config = RunConfig(**{"device": "cpu", "dtype": "float64", "epochs": 1} | dict(settings))
    with Engine(everything(), config) as engine:
        records = [step.record() for step in map(engine.step, engine.batches())]
        return {name: value.clone() for name, value in engine.learner.tensors().items()}, records


class _Participant(threading.Thread):
    """A rank that takes segments of random length, and merges after each."""

    def __init__(self, store: HashStore, rules: QuorumRules, rank: int, seed: int) -> None:
        super().__init__()
        replicas_of = dict.fromkeys(range(rules.replicas), 1)
        self.merges = OpenMerges(store, rules, replicas_of, rank)
        self.rank, self.pauses = rank, random.Random(seed * 100 + rank)
        self.took: list[tuple[int, tuple[int, ...]]] = []

    def run(self) -> None:
        for _ in range(5):
            time.sleep(self.pauses.choice([0, 0.001, 0.003, 0.02]))
            self.merges.register()
            ranks = self.merges.wait(time.monotonic() + 60, leads=True)
            if ranks:
                self.took.append((len(self.merges.decided), ranks))
        self.merges.end()


@pytest.mark.parametrize("seed", range(10))
def test_replicas_agree_on_who_merges_and_no_two_merges_go_apart(seed: int) -> None:
    number = 3 + seed % 3
    rules = QuorumRules(number, number // 2 + 1, 0.002 * (seed % 2))
    store = HashStore()
    ranks = [_Participant(store, rules, rank, seed) for rank in range(number)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
        assert not rank.is_alive()
    for rank in ranks:
        rank.merges.read()
    decided = ranks[0].merges.decided
    assert all(rank.merges.decided == decided for rank in ranks)
    of_rank = [[(at + 1, who) for at, who in enumerate(decided) if rank.rank in who] for rank in ranks]
    assert of_rank == [rank.took for rank in ranks]
    held = [set(who) for who in decided if who]
    assert all(len(who) >= rules.quorum for who in held)
    assert all(before & after for before, after in pairwise(held))


def test_a_quorum_that_does_not_come_ends_with_who_is_missing() -> None:
    merges = OpenMerges(HashStore(), QuorumRules(3, 2, 0.0), {0: 1, 1: 1, 2: 1}, 0)
    merges.register()
    with pytest.raises(RankTimeoutError, match="waits for rank 1, 2: 1 of 3 replicas are there"):
        merges.wait(time.monotonic() + 0.05, leads=True)


def test_what_all_have_read_is_deleted() -> None:
    store = HashStore()
    ranks = [_Participant(store, QuorumRules(3, 2, 0.0), rank, 1) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    ranks[0].merges.read()
    ranks[0].merges.delete()
    assert not store.check(["end"])
    assert not store.check(["0/decided"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quorum": 4}, "quorum=4 can never be met by 3 replicas"),
        ({"quorum": 1}, "give at least 2"),
        ({"quorum": 2, "num_fragments": 2}, "does not go with fragments"),
        ({"quorum": 2, "grace": -1.0}, "grace is -1.0"),
        ({"quorum": 2, "meet_every": 0}, "meet_every is 0"),
    ],
)
def test_a_quorum_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        _run({"strategy": LocalSgd(replicas=3, **options)})


def test_a_quorum_does_not_go_with_compression() -> None:
    with pytest.raises(ConfigurationError, match="compress=int8"):
        _run({"strategy": LocalSgd(replicas=3, quorum=2), "compress": "int8"})


def test_no_device_alone_repeats_a_quorum() -> None:
    with pytest.raises(ConfigurationError, match="verify with quorum=3"):
        verify(everything, RunConfig(device="cpu", processes=3, strategy=LocalSgd(quorum=2), steps=10))
