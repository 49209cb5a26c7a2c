"""How the engine and its balancer live together."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from evener.balance.by_speed import BySpeed
from evener.core.config.run_config import RunConfig
from evener.data.batch import Batch
from evener.distributed.session import Session
from evener.errors import ConfigurationError, ShareError
from evener.hardware.async_read import ReadyValue
from evener.tools.verify import verify
from evener.training.engine import Engine
from evener.training.fit import check_plan
from evener.training.run import Run
from tests import tasks
from tests.balancers import Random, Recorder

RECORDER = "tests.balancers:Recorder"


def engine_of(name: str = "plain", **settings: Any) -> Engine:
    return Engine(getattr(tasks, name)(), RunConfig(**({"device": "cpu", "steps": 7} | settings)))


def take_step(engine: Engine, batch: Batch, by_hand: bool) -> None:
    if not by_hand:
        engine.step(batch)
        return
    (micro,) = batch.micro_batches
    engine.backward(engine.loss.total(engine.model(micro.inputs), micro.targets), len(micro.samples))
    engine.update()


def observations(by_hand: bool) -> list[Any]:
    with engine_of(balance=RECORDER) as engine:
        for batch in engine.batches():
            take_step(engine, batch, by_hand)
        observed: list[Any] = engine.balancer.observed  # type: ignore[union-attr]
        return observed


@pytest.mark.parametrize("by_hand", [False, True])
def test_every_step_is_observed_once_and_alike_on_all_ranks(ranks: Any, by_hand: bool) -> None:
    first, *others = ranks(3).run(observations, by_hand)
    assert [step for step, *_ in first] == list(range(7))
    assert [shares for _, shares, _ in first] == [
        tuple(Random(3).shares(step, size)) for step, size in enumerate([13, 13, 13, 8, 13, 13, 13])
    ]
    for _, shares, seconds in first:
        assert [math.isnan(time) for time in seconds] == [share == 0 for share in shares]
    assert all(str(other) == str(first) for other in others)  # as text, in which NaN is NaN


def learn(steps: int, state: Any = None, seconds: tuple[float, ...] = (), **settings: Any) -> tuple[Any, Any]:
    """The engine's state after ``steps``, and the shares of each step.

    Args:
        seconds: What a sample takes on each rank, as far as the engine is told; as measured if there are none.
    """
    shares = []
    with engine_of(balance="auto", steps=None, epochs=9, batch_size=6, **settings) as engine:
        if state is not None:
            engine.load_state_dict(state)
        for batch in engine.batches():
            if seconds:
                rank = engine.session.rank
                took = ReadyValue(seconds[rank] * batch.shares[rank])
                engine.learner.work_timer.taken = lambda took=took: took  # type: ignore[method-assign,misc]
            engine.step(batch)
            shares.append(batch.shares)
            if engine.steps_done == steps:
                break
        engine.evaluate()
        return engine.state_dict(), shares


def test_auto_is_never_asked_beyond_what_it_has_settled(ranks: Any) -> None:
    """It would raise; the calibration and the slower rank make shares change."""
    for _, shares in ranks(2).run(learn, 40, throttle="1,0.1"):
        assert len(shares) == 40
        assert len({share for share in shares if sum(share) == 6}) > 2


def test_what_was_learned_goes_on_with_the_run(ranks: Any) -> None:
    slower = (0.001, 0.004)
    (state, _), _ = ranks(2).run(learn, 30, None, slower)
    assert state["balancer"]["observed"] == 29
    for _, shares in ranks(2).run(learn, 34, state, slower):
        assert len(shares) == 4
        assert shares[0] == (5, 1), "the new run began with equal shares"


def resumed_shares(state: Any) -> tuple[tuple[int, ...], bool]:
    with engine_of(balance="auto", steps=None, epochs=9, batch_size=6) as engine:
        engine.load_state_dict(state)
        return engine.feed.first_shares(engine.progress)


def test_the_next_shares_are_known_before_the_last_times_are(ranks: Any) -> None:
    """As on a device that runs behind its host."""
    (state, _), _ = ranks(2).run(learn, 30, None, (0.001, 0.004))
    state["balancer"]["observed"] -= 1
    assert ranks(2).run(resumed_shares, state) == [((5, 1), True)] * 2


def times_made() -> tuple[int, bool]:
    """How often a balancer is made for the header of a run and its batches; whether both have the same shares."""
    before = Recorder.made
    with engine_of(balance=RECORDER) as engine:
        shares, _ = engine.feed.first_shares(engine.progress)
        batch = next(iter(engine.batches()))
        return Recorder.made - before, tuple(batch.shares) == shares


def test_a_balancer_of_the_user_s_own_is_made_once(ranks: Any) -> None:
    assert ranks(2).run(times_made) == [(1, True)] * 2


def test_on_another_number_of_ranks_speeds_are_learned_anew(ranks: Any) -> None:
    (state, _), _ = ranks(2).run(learn, 12)
    for _, shares in ranks(3).run(learn, 16, state):
        assert all(len(share) == 3 for share in shares)


def evaluated_before_the_first_step(state: Any) -> float:
    with engine_of(balance="auto", steps=30) as engine:
        engine.load_state_dict(state)
        for _ in engine.batches():
            return engine.evaluate()["loss"]
    return math.nan


def test_a_resumed_run_can_evaluate_before_its_first_step(ranks: Any) -> None:
    (state, _), _ = ranks(2).run(learn_thirteen)
    state["balancer"] = {}
    for loss in ranks(2).run(evaluated_before_the_first_step, state):
        assert math.isfinite(loss)


def learn_thirteen() -> tuple[Any, None]:
    with engine_of(steps=10) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.state_dict(), None


def first_shares(**settings: Any) -> list[int]:
    with engine_of(**settings) as engine:
        return list(next(iter(engine.batches())).shares)


def test_the_limits_of_shares_reach_the_balancer(ranks: Any) -> None:
    assert ranks(2).run(first_shares, max_shares="4,-") == [[4, 9]] * 2
    assert (
        ranks(2).run(first_shares, share_multiple_of=8)
        == ranks(2).run(first_shares, share_multiple_of=8, balance="auto")
        == [[8, 5]] * 2
    )


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"max_shares": "4"}, ShareError, "1 max_shares"),
        ({"max_shares": "x,-"}, ShareError, "- for no limit"),
        ({"share_multiple_of": 0}, ConfigurationError, "share_multiple_of is 0"),
        ({"balance": "tests.balancers:Nothing"}, ShareError, "module tests.balancers has no Nothing"),
        (
            {"strategy": "dimension", "max_shares": "4,-"},
            ConfigurationError,
            "max_shares would do nothing: .* all 2 ranks",
        ),
        (
            {"strategy": "dimension", "balance": "auto", "share_multiple_of": 2},
            ConfigurationError,
            "balance 'auto' and share_multiple_of would do nothing",
        ),
        ({"throttle": "1"}, ConfigurationError, "1 factors for 2 ranks"),
        ({"throttle_at": ("5:2:0.5",)}, ConfigurationError, "there are 2 ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_is_found_before_anything_is_started(settings: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        check_plan(RunConfig(device="cpu", processes=2, **settings))


def leave_records(directory: Path) -> None:
    config = RunConfig(device="cpu", steps=7, balance=RECORDER, run_dir=directory)
    with Session(device="cpu") as session:
        Run(tasks.plain(), config, session, show=False).execute()


def test_decisions_and_times_are_on_record(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(leave_records, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    kinds = [record["kind"] for record in records if record["kind"] != "evaluation"]
    assert kinds == ["step"] * 3 + ["decision"] + ["step"] * 3 + ["decision", "step"]
    decision = next(record for record in records if record["kind"] == "decision")
    assert (decision["step"], decision["effective_step"]) == (2, 5)
    assert (decision["new_shares"], decision["reason"]) == ([9, 4], "step 2 is over")
    for record in records:
        if record["kind"] == "step":
            assert len(record["compute_seconds"]) == len(record["input_seconds"]) == 2
            assert min(record["compute_seconds"]) > 0


def test_an_auto_balancer_is_what_the_name_says() -> None:
    with engine_of(balance="auto") as engine:
        next(iter(engine.batches()))
        assert isinstance(engine.balancer, BySpeed)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_learned_shares_are_verified_against_one_device_that_is_not_throttled() -> None:
    settings = {
        "balance": "auto",
        "max_shares": "12,-",
        "share_multiple_of": 2,
        "throttle": "1,0.3",
        "throttle_at": ("9:1:1",),
    }
    result = verify("tests.tasks:batch_norm", processes=2, device="cpu", batch_size=12, steps=16, **settings)
    assert result.passed
    assert result.max_relative_weight_error <= 1e-12


def divided_otherwise(differs_from: int, by_hand: bool, most_rows: int) -> tuple[str, int, bool]:
    """What the rank says, after how many steps, and whether the weights are those of before."""
    with (
        mock.patch.dict(os.environ, DIFFERS_FROM=str(differs_from)),
        mock.patch("evener.training.step.exchange.MOST_ROWS", most_rows),
        engine_of(balance="tests.balancers:OfItsOwnMind") as engine,
    ):
        try:
            for batch in engine.batches():
                before = [p.detach().clone() for p in engine.model.parameters()]
                take_step(engine, batch, by_hand)
        except ShareError as error:
            same = all(map(torch.equal, before, engine.model.parameters()))
            return str(error), engine.steps_done, same
    return "", engine.steps_done, False


@pytest.mark.parametrize("most_rows", [64, 1])
@pytest.mark.parametrize("differs_from", [0, 2])
def test_ranks_that_come_to_different_shares_do_not_train_with_them(
    ranks: Any, differs_from: int, most_rows: int
) -> None:
    found = ranks(2).run(divided_otherwise, differs_from, False, most_rows)
    words = f"the ranks divide the batch of step {differs_from} in different ways: 7/6 on rank 0; 6/7 on rank 1. A"
    assert all(text.startswith(words) for text, *_ in found), found
    assert [(steps, same) for _, steps, same in found] == [(differs_from, True)] * 2


def test_a_loop_of_the_users_own_is_told_after_the_step(ranks: Any) -> None:
    found = ranks(2).run(divided_otherwise, 4, True, 64)
    assert all(
        text.startswith("the ranks divide the batch of step 4 in different ways: ") for text, *_ in found
    )
    assert [steps for _, steps, _ in found] == [4, 4]
