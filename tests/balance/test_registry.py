from __future__ import annotations

import pytest

from evener.balance.base import Equal, Fixed
from evener.balance.controller import Auto
from evener.balance.registry import fixed_weights, make_balancer
from evener.errors import ShareError
from tests.balancers import Recorder


@pytest.mark.parametrize(("text", "kind"), [("auto", Auto), ("equal", Equal), ("3,1", Fixed)])
def test_every_name_makes_its_balancer_within_caps_and_quantum(text: str, kind: type) -> None:
    balancer = make_balancer(text, 2, caps=[16, None], quantum=8)
    assert type(balancer) is kind
    shares = balancer.shares(0, 64)
    assert shares == [16, 48]


@pytest.mark.parametrize("text", ["fast", "", "Auto"])
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
    balancer = make_balancer("tests.balancers:Recorder", 3, caps=[1, None, 2], quantum=8, lookahead=5)
    assert isinstance(balancer, Recorder)
    assert balancer.options == {"caps": [1, None, 2], "quantum": 8, "lookahead": 5}
    for name in ("no.module:Class", "tests.balancers:Nothing", "tests.balancers:random", ":Recorder"):
        with pytest.raises(ShareError, match="no such class"):
            make_balancer(name, 3)


def test_weights_that_are_fixed() -> None:
    assert fixed_weights("3,1", 2) == [0.75, 0.25]
    assert fixed_weights("auto", 2) is fixed_weights("equal", 2) is fixed_weights("a:B", 2) is None
