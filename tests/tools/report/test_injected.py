"""Eight faults in real runs, each with the rank that has it, and a run without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from benchmarks.namespaces import Hosts, NoNamespacesError, Program

import evener
from evener.tools.report.gather import report_of
from evener.tools.report.schema import Report
from tests.distributed.processes import end, start_command
from tests.distributed.test_two_hosts import OWN_PROCESSES
from tests.ranks import RankPool
from tests.tools.report import faulty

NOISE = {"busy machine", "communication"}
"""What a machine on which other tests run may rightly be said to have."""


def train(fault: str, run_dir: Path) -> None:
    evener.fit(partial(faulty.task, fault), device="cpu", run_dir=run_dir, show=False, save_every="100epochs")


def trained(ranks: Callable[[int], RankPool], fault: str, run_dir: Path) -> Report:
    ranks(3).run(train, fault, run_dir)
    return report_of(run_dir)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("forward", "slow forward"),
        ("backward", "slow backward"),
        ("loader", "slow loader"),
        ("leak", "memory growth"),
    ],
)
def test_the_verdict_names_cause_and_rank(
    ranks: Callable[[int], RankPool], tmp_path: Path, fault: str, kind: str
) -> None:
    verdict = trained(ranks, fault, tmp_path / "run").verdict
    found = [(cause.kind, cause.rank) for cause in verdict.causes if cause.kind not in NOISE]
    assert (kind, faulty.CULPRIT) in found
    assert {rank for _, rank in found} == {faulty.CULPRIT}
    assert not verdict.healthy
    assert f"rank {faulty.CULPRIT}" in verdict.words


@pytest.mark.slow
def test_a_rank_with_too_many_threads_is_named(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    causes = trained(ranks, "threads", tmp_path / "run").verdict.causes
    assert ("oversubscribed threads", faulty.CULPRIT) in [(cause.kind, cause.rank) for cause in causes]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["death", "hang"])
def test_what_has_ended_the_ranks_is_named(tmp_path: Path, fault: str) -> None:
    options = ("--processes", "2", "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    ended = end(
        start_command("train", "tests.tools.report.faulty:task", "--option", f"fault={fault}", *options), 120
    )
    assert ended.status == 1
    first, *_ = report_of(tmp_path / "run").verdict.causes
    assert (first.kind, first.rank) == (fault, faulty.CULPRIT)


@pytest.mark.slow
def test_a_death_that_a_restart_has_healed_is_named(tmp_path: Path) -> None:
    options = (
        "--processes",
        "2",
        "--device",
        "cpu",
        "--run-dir",
        str(tmp_path / "run"),
        "--max-restarts",
        "1",
    )
    saved = ("--recover", "file", "--save-every", "5")
    task = ("tests.tools.report.faulty:task", "--option", "fault=death")
    ended = end(start_command("train", *task, *options, *saved), 120)
    assert ended.status == 0
    report = report_of(tmp_path / "run")
    first, second = report.attempts
    assert first.step == 0
    assert second.step in (5, 10)  # the save after step 10 may not be complete
    assert 0 < second.lost_steps <= 14 - second.step
    assert "rank 1" in second.reason
    cause = report.verdict.causes[0]
    assert (cause.kind, cause.rank) == ("death", faulty.CULPRIT)


@pytest.mark.slow
def test_the_host_with_a_slow_link_is_named(tmp_path: Path) -> None:
    """Three hosts in network namespaces, of which ``tc`` limits one to 50 Mbit/s in each direction."""
    settings = ["--processes", "1", "--device", "cpu", "--run-dir", str(tmp_path / "run"), "--steps", "12"]
    meet = [
        "--nnodes",
        "3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "host0:29400",
        "--rdzv-id",
        "report",
    ]
    task = ["tests.tools.report.faulty:task", "--option", "fault=link"]
    command = [*OWN_PROCESSES, sys.executable, "-m", "evener", "train", *task, *settings, *meet]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with Hosts(3, [None, 50.0, None]) as hosts:
            hosts.run([Program(host, command, variables) for host in range(3)], 120)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    report = report_of(tmp_path / "run")
    (rank,) = (cause.rank for cause in report.verdict.causes if cause.kind == "slow link")
    assert rank is not None
    assert report.ranks[rank].host == "host1"


def test_nothing_stands_out_in_a_healthy_run(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    verdict = trained(ranks, "none", tmp_path / "run").verdict
    assert not [cause for cause in verdict.causes if cause.kind not in NOISE]
