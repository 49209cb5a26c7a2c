from __future__ import annotations

from typing import Any

import pytest

from evener.distributed.launch.rendezvous import Rendezvous
from evener.errors import ConfigurationError


def test_default_is_one_machine() -> None:
    assert Rendezvous().is_standalone
    assert not Rendezvous(master_port=29501).is_standalone
    assert not Rendezvous(rdzv_backend="c10d", rdzv_endpoint="localhost:0").is_standalone


def test_static_options_reach_the_agent() -> None:
    parameters = Rendezvous(nnodes="2", node_rank=1, master_addr="head", master_port=29501).within(60)
    assert (parameters.backend, parameters.endpoint) == ("static", "head:29501")
    assert parameters.get_as_int("rank") == 1


def test_elastic_options_reach_the_agent() -> None:
    parameters = Rendezvous(
        nnodes="2:4",
        rdzv_backend="c10d",
        rdzv_endpoint="head:1",
        rdzv_id="7",
        rdzv_conf="join_timeout=9, a=b",
    ).within(60)
    assert (parameters.min_nodes, parameters.max_nodes, parameters.run_id) == (2, 4, "7")
    assert (parameters.endpoint, parameters.get_as_int("join_timeout"), parameters.get("a")) == (
        "head:1",
        9,
        "b",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": "0"}, "'0'"),
        ({"nnodes": "4:2"}, "'4:2'"),
        ({"nnodes": "two"}, "'two'"),
        ({"nnodes": "2", "node_rank": 2}, "2 of 2"),
        ({"nnodes": "2", "standalone": True}, "standalone"),
        ({"max_restarts": -1}, "-1"),
        ({"rdzv_backend": "etcd-v2", "rdzv_endpoint": "head:1"}, "'etcd-v2'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Rendezvous(**options)


def test_malformed_backend_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="key=value"):
        _ = Rendezvous(nnodes="2", rdzv_conf="join_timeout").within(60)


def test_machines_wait_for_each_other_as_long_as_ranks_do() -> None:
    parameters = Rendezvous(nnodes="2", rdzv_backend="c10d", rdzv_endpoint="head:1").within(4.5)
    assert [parameters.get_as_int(name) for name in ("join_timeout", "read_timeout")] == [5, 5]
    static = Rendezvous(nnodes="2", master_addr="head", rdzv_conf="timeout=9").within(4.5)
    assert static.get_as_int("timeout") == 9
