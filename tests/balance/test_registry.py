from __future__ import annotations

from typing import Any

import pytest

from evener.balance.base import Balancer, Equal, Fixed
from evener.balance.by_speed import BySpeed
from evener.balance.registry import fixed_weights, make_balancer
from evener.errors import ShareError
from tests.balancers import Recorder


@pytest.mark.parametrize(("text", "kind"), [("auto", BySpeed), ("equal", Equal), ("3,1", Fixed)])
def test_every_name_makes_its_balancer_within_its_limits(text: str, kind: type) -> None:
    balancer = make_balancer(text, 2, max_shares=[16, None], share_multiple_of=8)
    assert type(balancer) is kind
    shares = balancer.shares(0, 64)
    assert shares == [16, 48]


@pytest.mark.parametrize("text", ["fast", "", "BySpeed"])
def test_no_such_balancer_names_those_there_are(text: str) -> None:
    with pytest.raises(ShareError, match="auto, equal"):
        make_balancer(text, 2)


def test_the_lookahead_is_passed_on() -> None:
    assert make_balancer("auto", 2, lookahead=5).shares(0, 8) == [4, 4]
    balancer = make_balancer("auto", 2, lookahead=5)
    balancer.shares(0, 8)
    assert sum(balancer.shares(5, 8)) == 8
    with pytest.raises(ValueError, match="lookahead"):
        balancer.shares(6, 8)


def test_a_class_of_the_users_own() -> None:
    balancer = make_balancer(
        "tests.balancers:Recorder", 3, max_shares=[1, None, 2], share_multiple_of=8, lookahead=5
    )
    assert isinstance(balancer, Recorder)
    assert balancer.options == {"max_shares": [1, None, 2], "share_multiple_of": 8, "lookahead": 5}
    for name, words in (
        ("no.module:Class", "there is no module 'no'"),
        ("tests.balancers:Nothing", "has no Nothing; of this kind it has .*Recorder"),
        ("tests.balancers:random", "of type module, not a subclass of evener.balance.Balancer"),
        (":Recorder", "no balancer is called ':Recorder'; known are auto, equal"),
    ):
        with pytest.raises(ShareError, match=words):
            make_balancer(name, 3)


def test_weights_are_not_looked_for_in_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("evener.core.plugins.entry_points", lambda group: asked.append(group) or ())
    assert isinstance(make_balancer("3,0.5", 2), Fixed)
    assert not asked
    with pytest.raises(ShareError):
        make_balancer("thirds", 2)
    assert asked


def test_weights_that_are_fixed() -> None:
    assert fixed_weights("3,1", 2) == [0.75, 0.25]
    assert fixed_weights("auto", 2) is fixed_weights("equal", 2) is fixed_weights("a:B", 2) is None


class Smallest(Balancer):
    """With no constructor at all."""

    def shares(self, step: int, batch_size: int) -> list[int]:
        return [batch_size, 0]


class OfRanks(Smallest):
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


class WantsMore(Smallest):
    def __init__(self, world_size: int, color: str) -> None:
        raise AssertionError("never called")


def test_a_class_is_given_what_its_constructor_names() -> None:
    assert make_balancer(f"{__name__}:Smallest", 2, lookahead=7).shares(0, 3) == [3, 0]
    made = make_balancer(f"{__name__}:OfRanks", 2)
    assert isinstance(made, OfRanks)
    assert made.world_size == 2
    with pytest.raises(
        ShareError, match=r"WantsMore': it needs 'color'; what it may name is world_size, max_shares"
    ):
        make_balancer(f"{__name__}:WantsMore", 2)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_shares": [3, None]}, "no max_shares"),
        ({"share_multiple_of": 2}, "no share_multiple_of"),
        ({}, None),
    ],
)
def test_limits_are_not_ignored(limits: dict[str, Any], words: str | None) -> None:
    if words is None:
        make_balancer(f"{__name__}:OfRanks", 2, **limits)
        return
    with pytest.raises(ShareError, match=f"OfRanks' takes {words}: leave the option out, or give its"):
        make_balancer(f"{__name__}:OfRanks", 2, **limits)
