from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from evener.collectives.missing_ranks import RollCall
from evener.distributed.restart_count import START
from evener.distributed.session import Session
from evener.errors import RankError, RankTimeoutError


def explain(text: str, signers: tuple[int, ...]) -> str:
    """What rank 0 says of the backend's error, if ``signers`` got one too."""
    with Session(device="cpu", timeout_seconds=30) as session:
        roll_call = RollCall(dist.group.WORLD, grace_seconds=0.5)
        error = roll_call.explain(RuntimeError(text)) if session.rank in signers else None
        session.control.barrier()
        expected = RankTimeoutError if "Timed out" in text else RankError
        assert error is None or type(error) is expected
        return str(error)


def test_who_has_not_signed_is_missing_and_the_report_says_where_it_is(ranks: Any) -> None:
    first, second = ranks(2).run(explain, "Timed out waiting 5000ms", (0,))
    summary, *report = first.splitlines()
    assert "ended without rank 1: dead, stopped, or busy elsewhere. The backend said: Timed out" in summary
    assert len(report) == 2
    assert any(line.startswith("  rank 1 (host ") and Path(__file__).name in line for line in report)
    assert second == "None"


def test_all_that_signed_are_not_missing(ranks: Any) -> None:
    for said in ranks(3).run(explain, "Connection closed by peer", (0, 1, 2)):
        assert "broke off: a rank that failed at the same time as all others" in said


def after_a_replacement() -> str:
    """What a rank says of an error that both got, if rank 0 has stayed and rank 1 is new."""
    with Session(device="cpu", timeout_seconds=30) as session:
        if session.rank == 0:
            RollCall(dist.group.WORLD)
        with patch.dict(os.environ, {START: "1"}):
            roll_call = RollCall(dist.group.WORLD, grace_seconds=0.5)
        error = roll_call.explain(RuntimeError("Connection closed by peer"))
        session.control.barrier()
        return str(error)


def test_a_rank_that_stayed_signs_the_list_of_a_new_one(ranks: Any) -> None:
    for said in ranks(2).run(after_a_replacement):
        assert "broke off: a rank that failed at the same time as all others" in said
