"""Ranks on two hosts, which are namespaces: launcher, control channel, all-reduces and training over a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.namespaces import Hosts, NoNamespacesError, Program

import evener
from tests import spanning

pytestmark = pytest.mark.slow

SCRIPT = str(Path(spanning.__file__))
LAUNCHER = "import sys; from evener.cli.main import main; sys.exit(main())"
OWN_PROCESSES = [
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "sh",
    "-c",
    '"$0" "$@"; exit $?',
]
"""A host sees no processes of another, so neither their memory."""
MEET = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "spanning"]


def command(processes: int) -> list[str]:
    options = ["--processes", str(processes), "--device", "cpu", "--timeout-seconds", "40", *MEET]
    return [*OWN_PROCESSES, sys.executable, "-c", LAUNCHER, "run", *options, SCRIPT]


@pytest.fixture(scope="module")
def printed() -> list[list[dict[str, Any]]]:
    """What the ranks of each host printed: two on the first, one on the second."""
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with Hosts(2) as hosts:
            texts = hosts.run([Program(0, command(2), environment), Program(1, command(1), environment)], 80)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts]


def test_ranks_find_out_who_shares_a_host(printed: list[list[dict[str, Any]]]) -> None:
    assert [len(of_host) for of_host in printed] == [2, 1]
    assert all(rank["hosts"] == [[0, 1], [2]] for of_host in printed for rank in of_host)


def test_all_reduces_cross_hosts_and_shared_memory_refuses_to(printed: list[list[dict[str, Any]]]) -> None:
    for rank in (rank for of_host in printed for rank in of_host):
        assert rank["sums"] == [["native", True], ["ring-tree", True], ["two-level", True]]
        assert "host" in rank["refusal"]


def test_training_is_that_of_one_rank(printed: list[list[dict[str, Any]]]) -> None:
    alone = evener.fit("digits", device="cpu", processes=1, steps=spanning.STEPS, show=False).summary
    for rank in (rank for of_host in printed for rank in of_host):
        assert rank["loss"] == pytest.approx(alone.final_loss, rel=1e-5)
        assert rank["metrics"] == pytest.approx(alone.metrics, rel=1e-4)
        assert rank["all_reduce"].startswith("two-level (between hosts ring, inside ")


def test_what_wants_one_kind_of_device_is_refused(printed: list[list[dict[str, Any]]]) -> None:
    for rank in (rank for of_host in printed for rank in of_host):
        strategy, all_reduce = rank["refusals"]
        assert strategy.startswith("strategy 'sharded' wants one kind of device on all hosts")
        assert all_reduce.startswith("all-reduce 'ring' wants one kind of device on all hosts")


def test_nobody_on_the_network_reaches_a_run_on_one_machine(tmp_path: Path) -> None:
    parts = [[sys.executable, "-m", "tests.unreachable", part, str(tmp_path)] for part in ("run", "knock")]
    try:
        with Hosts(2) as hosts:
            texts = hosts.run([Program(number, part, {}) for number, part in enumerate(parts)], 80)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    found = json.loads(texts[1].splitlines()[-1])
    assert found["ports"] >= 4, "a store, gloo on each rank, and one that is to be reached"
    assert found["opened"] == [found["known"]]
