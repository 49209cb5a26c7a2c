"""Hosts of different kinds in one run: ranks that believe to be on two, which sum inside in ways of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from evener.collectives.native import Native
from evener.collectives.registry import default
from evener.engine import Engine
from evener.errors import ConfigurationError
from evener.runtime.session import Session
from tests.observers import Remembering
from tests.test_ledger import brittle


@contextmanager
def two_hosts() -> Iterator[Session]:
    """Ranks 0 and 1 have shared memory, as if they were of one maker, and ranks 2 and 3 messages."""

    def inside(group: Any, timeout_seconds: float) -> Any:
        apart = group.size() == 2 and session.rank >= 2
        return (Native if apart else default)(group, timeout_seconds)

    with (
        mock.patch("evener.collectives.shared_memory.two_level.hosts_of", return_value=((0, 1), (2, 3))),
        mock.patch("evener.collectives.registry.default", inside),
        Session(device="cpu") as session,
    ):
        session.mixed = True
        yield session


def trained(mixed: bool, drifts: bool = False, **settings: Any) -> tuple[float, list[Any], str]:
    """The sum of the weights, what observers were told, and what summed the gradients."""
    told = Remembering()
    usual: dict[str, Any] = {"strategy": "ddp", "dtype": "float64", "batch_size": 11, "epochs": 3} | settings
    with two_hosts() as session:
        session.mixed = mixed
        with Engine(brittle(None), session=session, observers=[told], **usual) as engine:
            if drifts and session.rank == 3:
                engine.learner.optimizer.register_step_post_hook(round_differently)
            for batch in engine.batches():
                engine.step(batch)
            words = engine.learner.synchronizer.words
            return sum(float(p.detach().sum()) for p in engine.model.parameters()), told.told, words


def round_differently(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))


def test_hosts_that_sum_in_their_own_ways_train_as_one(ranks: Any) -> None:
    alike, mixed = ranks(4).run(trained, False), ranks(4).run(trained, True)
    assert {weights for weights, *_ in mixed} == {mixed[0][0]}
    assert mixed[0][0] == pytest.approx(alike[0][0], rel=1e-12)
    (words,) = {words for *_, words in mixed}
    assert words == "two-level (between hosts ring, inside 1 of 2 shared-memory, inside 1 of 2 native)"


def test_devices_that_round_differently_are_brought_together_and_told_once(ranks: Any) -> None:
    found = ranks(4).run(trained, True, drifts=True, check_replicas=3)
    assert len({weights for weights, *_ in found}) == 1
    notes = [record.words for kind, record in found[0][1] if kind == "event"]
    assert [text for text in notes if "round differently" in text] == [
        "devices of different kinds round differently, so that their weights come apart in the last bits: all have "
        "those of rank 0 again, as after every 3 steps; heal and check_replicas change that"
    ]


def test_who_sets_check_replicas_to_none_has_none(ranks: Any) -> None:
    found = ranks(4).run(trained, True, drifts=True, check_replicas=0)
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
    with two_hosts() as session, mock.patch("evener.ledger.is_late", return_value=True):
        late = []
        for session.mixed in (False, True):
            with Engine(brittle(None), session=session, batch_size=11, strategy="ddp", steps=1) as engine:
                late.append(engine.ledger.steps_late)
        return late


def test_no_rank_is_late_where_others_are_not(ranks: Any) -> None:
    assert ranks(4).run(prompt) == [[2, 1]] * 4
