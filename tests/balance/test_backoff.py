from __future__ import annotations

import json

import pytest

from evener.balance.backoff import MOST_PATIENCE, Backoff
from evener.balance.policy import Policy, PredictedChange

POLICY = Policy(least_gain=0.03, sure_gain=0.1, errors=3.0, trial_errors=1.0, doubt_steps=10)


def test_a_change_at_once_must_exceed_its_least_size_and_its_errors() -> None:
    doubt = Backoff()
    assert doubt.is_sure(PredictedChange(1.0, 0.88, 0.03), POLICY)
    assert not doubt.is_sure(PredictedChange(1.0, 0.92, 0.001), POLICY)
    assert not doubt.is_sure(PredictedChange(1.0, 0.80, 0.08), POLICY)
    doubt.rash(2.0)
    assert not doubt.is_sure(PredictedChange(1.0, 0.88, 0.03), POLICY)
    doubt.rash(100.0)
    assert doubt.sudden == MOST_PATIENCE


def test_a_trial_that_failed_makes_the_next_harder_until_that_is_forgotten() -> None:
    doubt, change = Backoff(), PredictedChange(1.0, 0.95, 0.04)
    assert doubt.is_worth_a_trial(change, POLICY)
    assert not doubt.is_worth_a_trial(PredictedChange(1.0, 0.95, 0.06), POLICY)
    doubt.failed(POLICY)
    assert not doubt.is_worth_a_trial(change, POLICY)
    for _ in range(10):
        doubt.forget(POLICY)
    assert doubt.small == pytest.approx(1.5)
    assert doubt.is_worth_a_trial(change, POLICY)
    doubt.paid()
    assert doubt.small == 1.0


@pytest.mark.parametrize(
    ("step", "new", "rash"), [(20, (33, 31), True), (60, (33, 31), False), (20, (60, 4), False)]
)
def test_a_change_that_is_soon_made_back_was_rash(step: int, new: tuple[int, int], rash: bool) -> None:
    doubt = Backoff()
    doubt.jumped(10, (32, 32), (48, 16), POLICY)
    doubt.jumped(step, (48, 16), new, POLICY)
    assert (doubt.sudden > 1.0) is rash


def test_doubt_comes_back_from_json() -> None:
    for doubt in (Backoff(), Backoff(2.0, 1.5, (7, (1, 2), (2, 1)))):
        assert Backoff.from_values(json.loads(json.dumps(doubt.values()))) == doubt
