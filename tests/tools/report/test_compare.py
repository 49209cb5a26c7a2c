from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evener.errors import ConfigurationError, DataError
from evener.tools.report.compare import compare
from evener.tools.report.schema import Columns, EvaluationPoint, Goodput, Report, Series
from tests.tools.report.making import report


def noise(number: int, seed: int, correlation: float = 0.0) -> list[float]:
    """Numbers of variance 1 around 0, each correlated with the one before."""
    draws, found = np.random.default_rng(seed).normal(size=number), [0.0]
    for draw in draws:
        found.append(correlation * found[-1] + np.sqrt(1 - correlation**2) * draw)
    return found[1:]


def run(seconds: Sequence[float], name: str = "run", **others: Any) -> Report:
    found = report([{"compute": 0.1}], **others)
    return replace(found, identity=replace(found.identity, name=name), block_seconds=tuple(seconds))


def around(mean: float, seed: int, spread: float = 0.05, correlation: float = 0.0) -> Report:
    return run([mean * (1 + spread * each) for each in noise(200, seed, correlation)])


def test_a_run_that_is_slower_by_a_tenth_is_found_to_be() -> None:
    found = compare(around(0.1, 1), around(0.11, 2))
    step = found.step_seconds
    assert step.change == pytest.approx(0.1, abs=0.02)
    assert step.low is not None
    assert step.high is not None
    assert 0.07 < step.low < step.change < step.high < 0.13
    assert found.slower(0.05)
    assert not found.slower(0.2)
    assert not compare(around(0.11, 2), around(0.1, 1)).slower(0.05)


def test_a_change_of_5_percent_is_found_in_500_steps_of_10_percent_noise() -> None:
    for seed in range(20):
        old, new = (
            run([mean * (1 + 0.1 * each) for each in noise(500, at)])
            for mean, at in ((0.1, seed), (0.105, 99 + seed))
        )
        found = compare(old, new)
        assert found.step_seconds.is_clear
        assert found.slower(0.01)


def test_steps_that_are_correlated_have_wider_intervals() -> None:
    widths = []
    for correlation in (0.0, 0.9):
        step = compare(
            around(0.1, 1, correlation=correlation), around(0.1, 2, correlation=correlation)
        ).step_seconds
        assert step.low is not None
        assert step.high is not None
        widths.append(step.high - step.low)
    assert widths[1] > 1.5 * widths[0]


def test_a_slow_run_within_the_noise_does_not_fail() -> None:
    found = compare(around(0.1, 1, spread=0.3), around(0.102, 11, spread=0.3))
    assert found.step_seconds.change > 0.01
    assert not found.slower(0.01)


def test_the_same_reports_give_the_same_interval() -> None:
    assert compare(around(0.1, 1), around(0.11, 2)) == compare(around(0.1, 1), around(0.11, 2))


@pytest.mark.parametrize(
    ("field", "value", "words"), [("task", "other", "task"), ("batch_size", 9, "batch size")]
)
def test_runs_that_do_not_train_the_same_are_refused(field: str, value: Any, words: str) -> None:
    old, new = around(0.1, 1), around(0.1, 2)
    new = replace(new, identity=replace(new.identity, **{field: value}))
    with pytest.raises(ConfigurationError, match=f"cannot be compared: the {words} is"):
        compare(old, new)


def test_few_steps_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="at least 8"):
        compare(around(0.1, 1), run([0.1] * 7))


def test_what_changed_is_listed() -> None:
    old, new = around(0.1, 1), around(0.1, 2)
    identity = replace(
        new.identity, settings={"bucket_mb": 1.0, "run_dir": "b"}, versions={"torch": "2"}, devices=("cuda",)
    )
    found = compare(old, replace(new, identity=identity))
    assert [(each.name, each.old, each.new) for each in found.changed] == [
        ("setting bucket_mb", "None", "1.0"),
        ("version torch", "None", "2"),
        ("devices", "cpu", "cuda"),
    ]
    assert "setting bucket_mb: None -> 1.0" in found.words()
    same = compare(old, old).words()
    assert "settings, versions and devices are the same" in same
    assert same.splitlines()[0].endswith(": as fast")


def with_loss(report: Report, offset: float, number: int, seed: int) -> Report:
    losses = tuple(2.0 - 0.01 * at + offset + 0.01 * each for at, each in enumerate(noise(number, seed)))
    steps = tuple(range(number))
    return replace(
        report, columns=Columns(steps, steps), series=(Series("loss", "", losses, losses, losses),)
    )


def test_losses_are_compared_at_the_same_steps() -> None:
    """The shorter run decides: a loss that goes on to fall is no difference."""
    old, new = with_loss(around(0.1, 1), 0.0, 100, 3), with_loss(around(0.1, 2), 0.5, 60, 4)
    (loss,) = compare(old, new).losses
    assert loss.change == pytest.approx(0.5, abs=0.01)
    assert loss.is_clear
    (same,) = compare(old, with_loss(around(0.1, 2), 0.0, 60, 4)).losses
    assert same.change == pytest.approx(0.0, abs=0.01)


def test_metrics_are_those_of_the_last_evaluation_that_both_have() -> None:
    old, new = (
        replace(
            around(0.1, seed),
            evaluations=tuple(
                EvaluationPoint(at, 0, {"accuracy": at / 100 + gain, "odd": None}, 5, 1.0) for at in steps
            ),
            goodput=Goodput(compute=9.0, waiting=1.0 + gain),
        )
        for seed, gain, steps in ((1, 0.0, (10, 20, 30)), (2, 0.1, (10, 20)))
    )
    found = compare(old, new)
    assert [(each.name, each.old, each.new) for each in found.losses] == [
        ("evaluation accuracy", 0.2, pytest.approx(0.3))
    ]
    assert [each.name for each in found.parts] == ["compute", "waiting"]
