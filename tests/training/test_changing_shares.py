"""The trained weights do not depend on the shares, also where those are others in every step."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

import evener
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.training.engine import Engine
from tests import tasks
from tests.distributed.processes import call
from tests.tiers import NIGHTLY
from tests.training.test_exactness import apart, trajectory

RANDOM = "tests.balancers:Random"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("batch_norm", {"steps": 24}, marks=NIGHTLY),
        ("batch_norm", {"steps": 24, "batch_size": 12, "micro_batch": 4}),
        pytest.param("tokens", {"steps": 24}, marks=NIGHTLY),
        ("tokens", {"steps": 24, "micro_batch": 4, "clip_norm": 0.5}),
        ("dropout", {"steps": 16, "micro_batch": 5}),
        pytest.param("branches", {"steps": 16}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_weights_do_not_depend_on_shares_that_change_in_every_step(
    ranks: Any, name: str, settings: dict[str, Any]
) -> None:
    reference = trajectory(name, Environment(), **settings)
    divided = ranks(3).run(trajectory, name, balance=RANDOM, **settings)
    assert apart(reference, divided[0]) <= 1e-12
    assert divided[0].losses == pytest.approx(reference.losses, rel=1e-12, nan_ok=True)
    assert len({trajectory.digest for trajectory in divided}) == 1, "replicas differ"


def test_nor_on_shares_that_are_learned(ranks: Any) -> None:
    settings = {"steps": 40, "throttle_at": ("20:1:0.1",)}
    reference = trajectory("batch_norm", Environment(), steps=40)
    divided = ranks(2).run(trajectory, "batch_norm", balance="auto", throttle="1,0.3", **settings)
    assert apart(reference, divided[0]) <= 1e-12


class Recorded(NamedTuple):
    """One run, as a rank saw it."""

    ids: list[tuple[int, list[int]]]
    """Of each step: its epoch, and the ids of the rank's samples."""
    shares: list[tuple[int, ...]]
    ahead: int
    """How far the loader reads ahead."""


def recorded(balance: str) -> Recorded:
    config = RunConfig(device="cpu", balance=balance, workers=2, batch_size=5, epochs=3, throttle="1,0.2")
    ids, shares = [], []
    with Engine(tasks.plain(), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
            own = [i for micro in batch.micro_batches if micro.weight for i in micro.samples.tolist()]
            ids.append((batch.epoch, own))
            shares.append(batch.shares)
        assert engine.feed._loader is not None
        return Recorded(ids, shares, engine.feed._loader.lookahead)


def all_recorded() -> dict[str, Recorded]:
    return {balance: recorded(balance) for balance in ("equal", "auto", RANDOM)}


@pytest.mark.slow
def test_workers_read_ahead_across_changes_and_no_sample_is_repeated_or_lost() -> None:
    on_ranks = call(evener.launch, all_recorded, processes=2, device="cpu")
    together = {name: [runs[name] for runs in on_ranks] for name in on_ranks[0]}
    equal = _ids_by_step(together["equal"])
    for name, changes in (("equal", 1), ("auto", 2), (RANDOM, 5)):
        runs = together[name]
        assert len({shares for shares in runs[0].shares if sum(shares) == 5}) >= changes
        assert runs[0].shares == runs[1].shares
        assert [tuple(len(own) for _, own in step) for step in zip(*(r.ids for r in runs), strict=True)] == (
            runs[0].shares
        )
        for epoch in range(3):
            seen = Counter(i for run in runs for at, own in run.ids for i in own if at == epoch)
            assert seen == Counter(range(tasks.SAMPLES))
        assert _ids_by_step(runs) == equal, "a global batch has other samples when shares change"
        assert runs[0].ahead == together["equal"][0].ahead >= 2, "the loader reads ahead less"


def _ids_by_step(runs: list[Recorded]) -> list[list[int]]:
    return [
        sorted(i for _, own in step for i in own) for step in zip(*(run.ids for run in runs), strict=True)
    ]
