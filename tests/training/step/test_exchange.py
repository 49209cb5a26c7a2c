"""Ranks that add up what they tell each other, as thousands do: four that believe to be too many for rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.balance.base import Decision
from evener.collectives.hierarchical_sum import Levels, Summing
from evener.core.task.task import Task
from evener.distributed.control_channel import Pending, Rows
from evener.distributed.mesh import Layout, Mesh
from evener.distributed.session import Session
from evener.errors import DivergenceError, RankTimeoutError
from evener.hardware.async_read import ReadyValue
from evener.hardware.memory.step_usage import NOTHING, News
from evener.training.engine import Engine
from evener.training.step.exchange import ROWS_EVERY, BySums, GatheredStep, loss_code, results_of
from evener.training.step.step import RankStats
from tests.observers import Remembering
from tests.tiers import ALWAYS, NIGHTLY, spread
from tests.training.step.test_step_sync import brittle

STEPS = 20


@contextmanager
def too_many(most: int = 1, late: bool = False) -> Iterator[None]:
    """For rows, beyond ``most`` ranks."""
    with (
        mock.patch("evener.training.step.exchange.MOST_ROWS", most),
        mock.patch("evener.training.step.step_sync.is_late", return_value=late),
    ):
        yield


def task(bad: int | None = None) -> Task:
    return replace(brittle(bad), batch_size=11, epochs=9)


def trained(most: int, late: bool, by_hand: bool = False, **settings: Any) -> tuple[Any, Any, float]:
    """What observers are told, the shares of each step, and the sum of the weights."""
    told, shares = Remembering(), []
    options: dict[str, Any] = {
        "strategy": "ddp",
        "dtype": "float64",
        "device": "cpu",
        "steps": STEPS,
    } | settings
    with too_many(most, late), Engine(task(), observers=[told], **options) as engine:
        for batch in engine.batches():
            seconds = 0.001 * (1 + engine.session.rank) * batch.shares[engine.learner.data.index]
            if by_hand:
                engine._by_hand.work_timer.taken = lambda seconds=seconds: ReadyValue(seconds)  # type: ignore[method-assign,misc]
                (micro,) = batch.micro_batches
                total = engine.loss.total(engine.model(micro.inputs), micro.targets)
                engine.backward(total, len(micro.samples))
                engine.update()
            else:
                engine.learner.work_timer.taken = lambda seconds=seconds: ReadyValue(seconds)  # type: ignore[method-assign,misc]
                engine.step(batch)
            shares.append(batch.shares)
        weights = sum(float(p.detach().sum()) for p in engine.model.parameters())
    return told, shares, weights


@pytest.mark.parametrize("late", spread([False, True], NIGHTLY, ALWAYS))
def test_sums_train_as_rows_do_and_rows_follow_now_and_then(ranks: Any, late: bool) -> None:
    (rows, *_), (sums, *others) = (ranks(4).run(trained, most, late, balance="equal") for most in (64, 1))
    assert sums[2] == rows[2]
    assert [weights for _, _, weights in others] == [sums[2]] * 3
    told = sums[0].steps
    assert [(record.step, record.loss) for record in told] == [
        (record.step, pytest.approx(record.loss, rel=1e-12)) for record in rows[0].steps
    ]
    known = [record.step for record in told if record.compute_seconds]
    first = 0 if not late else -1  # there times go with the row of the next step
    assert known == [step for step in range(STEPS) if (step - first) % ROWS_EVERY == 0]
    assert all(len(record.memory_held) == (4 if record.step % ROWS_EVERY == 0 else 0) for record in told)


@pytest.mark.parametrize(
    ("late", "by_hand"), spread([(False, False), (True, False), (False, True)], NIGHTLY, ALWAYS, ALWAYS)
)
def test_shares_follow_speeds_that_each_rank_knows_of_itself(ranks: Any, late: bool, by_hand: bool) -> None:
    found = ranks(4).run(trained, 1, late, by_hand, balance="auto", steps=40, batch_size=40)
    shares = found[0][1]
    assert all(other == shares for _, other, _ in found)
    assert shares[-1] == pytest.approx((19, 10, 6, 5), abs=1)
    if not by_hand:
        decision = next(record for _, record in found[0][0].told if isinstance(record, Decision))
        assert decision.reason.startswith("ranks differ in speed")


def test_an_own_balancer_gets_the_times_of_all_ranks(ranks: Any) -> None:
    (told, *_), *_ = ranks(4).run(trained, 1, False, balance="tests.balancers:Recorder")
    assert all(len(record.compute_seconds) == 4 for record in told.steps)


def test_tensor_teams_tell_too(ranks: Any) -> None:
    mesh = {"strategy": "ddp,tensor", "mesh": "data=2,tensor=2"}
    (rows, *_), (sums, *_) = (ranks(4).run(trained, most, False, balance="equal", **mesh) for most in (64, 1))
    assert sums[2] == rows[2]
    (_, shares, _), *_ = ranks(4).run(trained, 1, False, balance="auto", steps=40, batch_size=40, **mesh)
    assert shares[-1] == pytest.approx((27, 13), abs=2), "ranks 1 and 3 are the slow ones of their teams"


def stopped(late: bool, bad: int, what: str) -> str:
    with too_many(late=late):
        try:
            with Engine(task(bad if what == "gradient" else None), strategy="ddp", device="cpu") as engine:
                for batch in engine.batches():
                    if what == "loss" and engine.session.rank == 2 and engine.steps_done == 3:
                        for micro in batch.micro_batches:
                            micro.inputs.fill_(math.nan)
                    engine.step(batch)
        except DivergenceError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("late", spread([False, True], ALWAYS, NIGHTLY))
def test_who_was_not_finite_is_named_on_all_ranks(ranks: Any, late: bool) -> None:
    found = ranks(4).run(stopped, late, 13, "loss")
    assert {text.split(";")[0] for text in found} == {"the loss is nan in step 3 on rank 2"}
    (text,) = {text.split(":")[0] for text in ranks(4).run(stopped, late, 13, "gradient")}
    assert text.startswith("a gradient is not finite in step ")


class Skips(nn.Module):
    """A layer that nobody uses, and one that samples of rank 0 alone do."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.rare = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.used(x)
        return scores + self.rare(x) if dist.get_rank() == 0 else scores


def without_gradient() -> list[str]:
    moved = []
    with too_many(), Engine(replace(task(), model=Skips), strategy="ddp", device="cpu", steps=2) as engine:
        before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        for batch in engine.batches():
            engine.step(batch)
        moved = [name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])]
        (unused,) = [p for name, p in engine.model.named_parameters() if name == "unused.weight"]
        assert not engine.learner.optimizer.state.get(unused)
    return moved


def test_what_no_rank_used_has_no_gradient(ranks: Any) -> None:
    used = ["used.weight", "used.bias", "rare.weight", "rare.bias"]
    assert ranks(4).run(without_gradient) == [used] * 4


# What a rank has to say that is its own


class Both:
    """Another rank that says the same as this one."""

    def __init__(self) -> None:
        self.rows = 0

    def start(self, added: Sequence[float], greatest: Sequence[float]) -> Any:
        return mock.Mock(wait=lambda: ([2 * value for value in added], list(greatest)))

    def exchange(self, values: Sequence[float]) -> Rows:
        self.rows += 1
        return Pending(lambda: [list(values), list(values)])


def telling() -> tuple[BySums, Both]:
    both = Both()
    mesh = Mesh(Layout({"data": 2}), 0, None, 1.0, timedelta(seconds=1))
    speech = mock.Mock(line=tuple, wants_rows=False, voice=lambda step: None)
    return BySums(both, mesh, both, lambda: speech), both


def test_a_rank_that_ran_out_of_memory_is_heard_a_step_later() -> None:
    one, both = telling()
    news = NOTHING._replace(news=News(won=7))
    told: list[GatheredStep] = []
    for step in range(6):
        signal = RankStats(1.0, 0.0, 0.0, 0.0, retries=float(step in (1, 3)))
        told.append(one.start(step, signal, news if step == 3 else NOTHING, None)())
    assert [heard.rows is not None for heard in told] == [True, False, True, False, True, False]
    assert [heard.rows.retries for heard in told if heard.rows] == [(0, 0), (1, 1), (1, 1)]
    assert [any(map(any, heard.memory[-6:])) for heard in told if heard.rows] == [False, False, True]
    assert both.rows == 3


@pytest.mark.parametrize("total", [math.nan, math.inf, -math.inf])
def test_of_several_bad_ranks_the_first_is_named(total: float) -> None:
    codes = [loss_code(value, 100 - rank) for rank, value in enumerate([1.0, 2.0, total, math.inf])]
    assert str(results_of(0.0, max(codes), 0.0, 100).loss) == str((2, total))
    assert results_of(5.0, 0.0, 0.0, 100).loss is None


def missing(codes: Sequence[float], at: int) -> Sequence[float]:
    """What rank ``at`` of two stages of two ranks hears of the codes of all."""
    layout = Layout({"pipeline": 2, "data": 2})
    heard: list[Sequence[float]] = []
    for rank, code in enumerate(codes):
        mesh = Mesh(layout, rank, None, 1.0, timedelta(seconds=1))
        sums = mock.Mock(start=lambda added, greatest: heard.append(greatest) or mock.Mock())  # type: ignore[func-returns-value]
        speech = mock.Mock(line=tuple, wants_rows=False, voice=lambda step: None)
        own = BySums(Both(), mesh, sums, mock.Mock(return_value=speech))
        own.start(1, RankStats(0.0, code, 0.0, 0.0), NOTHING, None)
        if rank == at:
            mine = own
    greatest = [max(column) for column in zip(*heard, strict=True)]
    return mine._heard([0.0, 0.0, 0.0], greatest, None, None, False).missing


def test_missing_gradients_are_those_of_ranks_that_hold_the_same() -> None:
    assert missing([5.0, 5.0, 0.0, 0.0], 0) == (5, 5)
    assert missing([5.0, 7.0, 0.0, 0.0], 1) == (5, 7)
    assert missing([5.0, 0.0, 3.0, 3.0], 0) == (0, 5)
    assert missing([5.0, 0.0, 3.0, 3.0], 3) == (3, 3)


# Sums in two levels


def summed(block: int | None, rows: int) -> list[tuple[list[float], list[float]]]:
    with Session(device="cpu") as session:
        assert session.world is not None
        levels: Summing = Levels(session.world, 30.0, session.watchdog, block)
        rank = session.rank
        under = [
            levels.start([0.1 * rank + at, rank == 2 and math.nan], [rank * at, -rank]) for at in range(rows)
        ]
        found = [each.wait() for each in under]
        levels.close()  # type: ignore[attr-defined]
        return found


@pytest.mark.parametrize("block", [None, 1, 2, 3, 4])
def test_sums_are_the_same_on_all_ranks_whatever_the_blocks(ranks: Any, block: int | None) -> None:
    first, *others = ranks(4).run(summed, block, 3)
    assert all(str(other) == str(first) for other in others)
    for at, (added, greatest) in enumerate(first):
        assert added[0] == pytest.approx(0.6 + 4 * at, rel=1e-12)
        assert math.isnan(added[1])
        assert greatest == [3 * at, 0]


def without_rank_3() -> str:
    with Session(device="cpu") as session:
        assert session.world is not None
        levels = Levels(session.world, 1.0, session.watchdog)
        try:
            if session.rank != 3:
                levels.start([1.0], [1.0]).wait()
        except RankTimeoutError as error:
            return str(error)
        finally:
            session.control.barrier()
            levels.close()
    return ""


def test_a_rank_that_does_not_come_ends_the_wait(ranks: Any) -> None:
    *waited, away = ranks(4).run(without_rank_3)
    assert away == ""
    assert all("rank 3" in text for text in waited[2:]), waited
    assert all(waited)
