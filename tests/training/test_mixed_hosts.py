"""Hosts of different kinds in one run: ranks that believe to be on two, which sum inside in ways of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.collectives.native import Native
from evener.collectives.registry import default
from evener.core.records import Note
from evener.core.task.task import Task
from evener.distributed.mesh import Mesh
from evener.distributed.session import Session
from evener.errors import ConfigurationError, DivergenceError
from evener.nn.batch_norm_peers import Peers
from evener.strategies import sync_batch_norm as normalize
from evener.training.consistency.rounding import is_rounding
from evener.training.engine import Engine
from tests.observers import Remembering
from tests.training.step.test_step_sync import brittle


@contextmanager
def two_hosts() -> Iterator[Session]:
    """Ranks 0 and 1 have shared memory, as if they were of one maker, and ranks 2 and 3 messages."""

    def inside(group: Any, timeout_seconds: float) -> Any:
        apart = group.size() == 2 and session.rank >= 2
        return (Native if apart else default)(group, timeout_seconds)

    with (
        mock.patch("evener.collectives.shared_memory.multi_host.hosts_of", return_value=((0, 1), (2, 3))),
        mock.patch("evener.collectives.registry.default", inside),
        Session(device="cpu") as session,
    ):
        session.mixed = True
        yield session


def trained(
    mixed: bool, disturb: Any = None, make: Callable[[], Task] = lambda: brittle(None), **settings: Any
) -> tuple[float, list[Any], tuple[str, ...]]:
    """The sum of the weights, the records of observers, and the all-reduces of this rank: outer, inside and between
    hosts.

    Args:
        disturb: A hook of the optimizer's on rank 3, after each of its steps.
    """
    told = Remembering()
    usual: dict[str, Any] = {"strategy": "ddp", "dtype": "float64", "batch_size": 11, "epochs": 3} | settings
    with two_hosts() as session:
        session.mixed = mixed
        with Engine(make(), session=session, observers=[told], **usual) as engine:
            if disturb and session.rank == 3:
                engine.learner.optimizer.register_step_post_hook(disturb)
            for batch in engine.batches():
                engine.step(batch)
            weights = sum(float(p.detach().sum()) for p in engine.model.parameters())
            return weights, told.told, levels(engine)


def levels(engine: Engine) -> tuple[str, ...]:
    """Names of the all-reduce that sums a rank's gradients, and of those inside its host and between hosts."""
    outer = engine.learner.synchronizer._all_reduce  # type: ignore[attr-defined]
    parts = [getattr(outer, part, None) for part in ("_inner", "_between")]
    return (outer.name, *("" if part is None else part.name for part in parts))


def round_differently(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))


def corrupt(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0][0, 0] += 1e-3


def test_hosts_that_sum_in_their_own_ways_train_as_one(ranks: Any) -> None:
    """The first rank of each host exchanges its host's sum. Ranks of one kind have one all-reduce for all."""
    alike, mixed = ranks(4).run(trained, False), ranks(4).run(trained, True)
    assert {weights for weights, *_ in mixed} == {mixed[0][0]}
    assert mixed[0][0] == pytest.approx(alike[0][0], rel=1e-12)
    assert [found for *_, found in mixed] == [
        ("two-level", "shared-memory", "ring"),
        ("two-level", "shared-memory", ""),
        ("two-level", "native", "ring"),
        ("two-level", "native", ""),
    ]
    assert [found for *_, found in alike] == [("shared-memory", "", "")] * 4


def test_devices_that_round_differently_are_brought_together_and_reported_once(ranks: Any) -> None:
    """Twelve steps are compared four times. The first comparison finds the difference of rank 3, and reports it."""
    found = ranks(4).run(trained, True, round_differently, check_replicas=3)
    undisturbed = ranks(4).run(trained, True, check_replicas=3)
    assert len({weights for weights, *_ in found}) == 1
    assert found[0][0] == pytest.approx(undisturbed[0][0], rel=1e-12)
    notes = [record for kind, record in found[0][1] if kind == "event"]
    assert [(type(note), note.step) for note in notes] == [(Note, 3)]
    assert set(re.findall(r"\d+|\w+_\w+", notes[0].words)) == {
        "0",
        "3",
        "on_replica_mismatch",
        "check_replicas",
    }
    assert [record for kind, record in undisturbed[0][1] if kind == "event"] == []


def corrupted() -> str:
    try:
        trained(True, corrupt, check_replicas=3)
    except DivergenceError as error:
        return str(error)
    return ""


def test_what_is_no_rounding_is_not_taken_for_it(ranks: Any) -> None:
    for text in ranks(4).run(corrupted):
        assert text.startswith(
            "after step 2 inner.weight of rank 3 was farther from that of rank 0 than devices"
        )


@pytest.mark.parametrize(
    ("numbers", "right", "is_so"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-14], True),
        ([1.0, 2.0], [1.0, 2.001], False),
        ([1.0, math.nan], [1.0, 2.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([], [], True),
        ([3], [4], False),
    ],
)
def test_rounding_is_told_from_other_differences(numbers: list[Any], right: list[Any], is_so: bool) -> None:
    kind = torch.int64 if numbers == [3] else torch.float64
    assert is_rounding(torch.tensor(numbers, dtype=kind), torch.tensor(right, dtype=kind), 10) is is_so


class Averages(nn.Module):
    """Writes a buffer of its own, from what its rank has at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
        scores: Tensor = self.inner(x)
        return scores


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def as_on_a_card(model: Callable[[], nn.Module]) -> float:
    """Where ranks 0 and 1 take the way of a card."""
    own_meeting = normalize._meet

    def meeting(mesh: Mesh, axes: Sequence[str]) -> Peers:
        with mock.patch.object(mesh, "device_type", "cuda"):
            return own_meeting(mesh, axes)

    with ExitStack() as cards:
        if dist.get_rank() < 2:
            cards.enter_context(mock.patch("evener.strategies.sync_batch_norm._meet", meeting))
            cards.enter_context(mock.patch("evener.strategies.buffers.is_late", return_value=True))
        return trained(True, make=lambda: replace(brittle(None), model=model), timeout_seconds=20.0)[0]


@pytest.mark.parametrize("model", [normed, Averages])
def test_ranks_with_and_without_a_card_meet_in_the_same_calls(
    ranks: Any, model: Callable[[], nn.Module]
) -> None:
    """BatchNorm has messages of its own, and buffers that a model writes are compared."""
    alike, mixed = ranks(4).run(trained, True, make=lambda: replace(brittle(None), model=model)), None
    mixed = ranks(4).run(as_on_a_card, model)
    assert len(set(mixed)) == 1
    assert mixed[0] == pytest.approx(alike[0][0], rel=1e-12)


def test_who_sets_check_replicas_to_none_has_none(ranks: Any) -> None:
    found = ranks(4).run(trained, True, round_differently, check_replicas=0)
    assert len({weights for weights, *_ in found}) == 2


def refused(**settings: Any) -> str:
    with two_hosts() as session:
        try:
            Engine(brittle(None), session=session, batch_size=11, **settings).close()
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "sharded"},
        {"strategy": "ddp,tensor", "mesh": "data=2,tensor=2"},
        {"strategy": "ddp", "allreduce": "tree"},
        {"strategy": "ddp", "allreduce": "auto"},
    ],
)
def test_what_wants_one_kind_of_device_is_refused(ranks: Any, settings: dict[str, str]) -> None:
    (text,) = set(ranks(4).run(refused, **settings))
    assert "wants one kind of device on all hosts" in text


def on_the_group_of_a_script() -> str:
    try:
        with Session(device="mixed"):
            return ""
    except ConfigurationError as error:
        return str(error)


def test_a_group_that_is_there_already_cannot_be_mixed(ranks: Any) -> None:
    (text,) = set(ranks(2).run(on_the_group_of_a_script))
    assert text.startswith("device mixed, and there is a process group already")


def prompt() -> list[int]:
    """How late times are known on a device that runs behind, alone with its like and mixed."""
    with two_hosts() as session, mock.patch("evener.training.step.step_sync.is_late", return_value=True):
        late = []
        for session.mixed in (False, True):
            with Engine(brittle(None), session=session, batch_size=11, strategy="ddp", steps=1) as engine:
                late.append(engine.step_sync.steps_late)
        return late


def test_no_rank_is_late_where_others_are_not(ranks: Any) -> None:
    assert ranks(4).run(prompt) == [[2, 1]] * 4
