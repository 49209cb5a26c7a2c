"""Three depths under one name: which options go with which, and what runs."""

from __future__ import annotations

from typing import Any

import pytest

from evener.errors import ConfigurationError
from evener.strategies.composed import laid
from evener.strategies.registry import strategies_called
from evener.strategies.sharded.fsdp import Fsdp
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.sharded.zero import Zero


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        ({}, Fsdp()),
        ({"wrap": "blocks.*", "reshard": False, "offload": True}, Fsdp("blocks.*", False, True)),
        ({"zero": 1}, Zero(1)),
        ({"zero": 2, "shard_sizes": "2,1"}, Zero(2, "2,1")),
    ],
    ids=str,
)
def test_a_depth_is_one_of_two_strategies(options: dict[str, Any], depth: Any) -> None:
    found = Sharded(**options)
    assert found._depth == depth
    assert (found.label, found.axis, found.combines) == ("sharded", "shard", depth.combines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 4}, "zero is 4; there are 1, 2 and 3"),
        ({"shard_sizes": "2,1"}, "shard_sizes=2,1 goes with zero=1 and zero=2"),
        ({"zero": 2, "wrap": "blocks.*"}, "wrap goes with zero=3, not with zero=2"),
        ({"zero": 1, "reshard": False}, "reshard goes with zero=3"),
        ({"zero": 2, "offload": True}, "offload goes with zero=3"),
        ({"zero": 2, "shard_sizes": "2,many"}, "shard_sizes='2,many' of strategy 'sharded'"),
    ],
    ids=str,
)
def test_options_go_with_a_depth(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Sharded(**options)


def test_it_is_named_on_the_command_line() -> None:
    found = laid(strategies_called("sharded", ["zero=2", "shard_sizes=2,1"]), None, 2)
    assert found == Sharded(zero=2, shard_sizes="2,1")
    assert str(found) == "sharded(zero=2, shard_sizes=2,1)"
    assert laid((), "data=2,shard=2", 4).label == "ddp 2 x sharded 2"
