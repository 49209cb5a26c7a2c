from __future__ import annotations

import pytest

from evener.balance.throttle import Change, Throttle
from evener.errors import ConfigurationError


def test_a_rank_sleeps_in_proportion_to_its_own_time() -> None:
    throttle = Throttle.parse("1,0.5,0.25", [], 3)
    assert [throttle.sleep_seconds(0, rank, 0.01) for rank in range(3)] == pytest.approx([0, 0.01, 0.03])


def test_changes_hold_from_their_step_on() -> None:
    throttle = Throttle.parse("1,0.5", ["20:1:1", "10:1:0.25", "10:0:0.5"], 2)
    assert [throttle.factor(step, 1) for step in (0, 9, 10, 19, 20, 99)] == [0.5, 0.5, 0.25, 0.25, 1, 1]
    assert [throttle.factor(step, 0) for step in (9, 10)] == [1, 0.5]


def test_changes_alone() -> None:
    assert Throttle.parse(None, ["5:0:0.5"], 2) == Throttle((1.0, 1.0), (Change(5, 0, 0.5),))


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        ("1", [], "1 factors for 2 ranks"),
        ("1,0", [], "rank 1 cannot run at 0.0"),
        ("1,2", [], "rank 1 cannot run at 2.0"),
        ("nan,1", [], "rank 0 cannot run at nan"),
        ("1,fast", [], "one factor for each rank"),
        (None, ["10:1"], "STEP:RANK:FACTOR"),
        (None, ["10:1:x"], "STEP:RANK:FACTOR"),
        (None, ["10:2:0.5"], "there are 2 ranks"),
        (None, ["-1:0:0.5"], "steps start at 0"),
        (None, ["1:0:0"], "rank 0 cannot run at 0.0"),
    ],
)
def test_what_cannot_be(text: str | None, changes: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Throttle.parse(text, changes, 2)


def test_an_emulation_says_what_it_is() -> None:
    words = Throttle.parse("1,0.5", ["20:0:0.25"], 2).words
    assert (
        words
        == "EMULATION of unequal devices by sleeping: ranks run at 1, 0.5 of their speed; rank 0 at 0.25 from step 20"
    )
