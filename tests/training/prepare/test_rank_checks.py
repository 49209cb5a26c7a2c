"""What ranks tell each other of their updates, and the words where they differ."""

from __future__ import annotations

from typing import Any

import pytest

import evener
from evener.errors import ConfigurationError
from evener.training.prepare.rank_checks import check_calls, check_strangers, check_updates, folded
from tests.training.prepare.running import Loop, prepared


def test_gradients_and_rates_are_told_apart() -> None:
    same = folded(0, 0, 7)
    check_strangers([same, same, 0])
    check_strangers([folded(0, 5, 0), folded(0, 5, 7), folded(same, 0, 0)])
    assert folded(0, 2**52, 2**32) < 2**53, "a double holds it"
    with pytest.raises(ConfigurationError, match="another learning rate on rank 2 than on rank 0"):
        check_strangers([same, 0, folded(0, 0, 8)])
    with pytest.raises(ConfigurationError, match="other gradients on rank 1 than on rank 0"):
        check_strangers([folded(0, 5, 7), folded(0, 6, 7)])
    with pytest.raises(ConfigurationError, match="another learning rate"):
        check_strangers([folded(folded(0, 0, 1), 0, 2), folded(folded(0, 0, 3), 0, 2)])


def test_the_words_name_what_own_samples_decide() -> None:
    with pytest.raises(
        ConfigurationError, match="if, continue or break in front of them must not be decided"
    ):
        check_calls([0, 2])
    with pytest.raises(ConfigurationError, match="an if that a rank's own samples decide"):
        check_updates([1, 2], "the loss")


def with_a_rate_of_its_own(_: bool) -> str:
    loop = Loop(True)
    x, y = next(iter(loop.loader))
    loop.backward(x, y)
    loop.optimizer.param_groups[0]["lr"] = 0.1 * (1 + evener.rank())
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    try:
        loop.backward(x, y)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_rates_are_compared_when_ranks_next_meet(ranks: Any) -> None:
    for said in ranks(2).run(prepared, with_a_rate_of_its_own):
        assert "another learning rate on rank 1 than on rank 0" in said


def test_alone_any_rate_will_do() -> None:
    assert prepared(with_a_rate_of_its_own) == ""
