from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from evener.distributed.session import Session
from evener.distributed.shm.scoreboard import Scoreboard, quickest
from evener.errors import ConfigurationError, RankError, RankTimeoutError
from evener.training.engine import Engine
from tests import tasks


def exchange_many(rounds: int) -> list[list[list[float]]]:
    with Session(device="cpu") as session:
        assert session.world is not None
        board = Scoreboard(session.world, session.watchdog, 10)
        rank, seen = session.rank, []
        for number in range(rounds):
            pending = board.exchange([rank, number, math.nan if rank == 1 else -0.0])
            if number % 3 == rank:
                dist.barrier()  # the ranks come at different times
            elif number % 3 < session.world_size:
                dist.barrier()
            seen.append(pending.wait())
        return seen


def test_every_rank_reads_what_every_rank_posted(ranks: Any) -> None:
    for seen in ranks(2).run(exchange_many, 11):
        for number, rows in enumerate(seen):
            assert [row[:2] for row in rows] == [[0, number], [1, number]]
            assert math.copysign(1, rows[0][2]) == -1
            assert math.isnan(rows[1][2])


def segments_after_an_engine() -> tuple[int, int]:
    """Segments of shared memory that an engine has mapped, and those that are left when it is closed but still held."""
    before = mapped()
    with Engine(tasks.plain(), steps=1, device="cpu", allreduce="native") as engine:
        for batch in engine.batches():
            engine.step(batch)
        during = mapped()
    left = mapped() - before
    return len(during - before), len(left) * engine.steps_done


def mapped() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "memfd:evener-all-reduce" in line}


def test_a_closed_engine_holds_no_shared_memory(ranks: Any) -> None:
    for during, left in ranks(2).run(segments_after_an_engine):
        assert during > 0
        assert left == 0


def kind_of_channel() -> str:
    with Session(device="cpu") as session:
        return type(quickest(session)).__name__


def test_ranks_of_one_host_get_a_board(ranks: Any) -> None:
    assert ranks(2).run(kind_of_channel) == ["Scoreboard", "Scoreboard"]


def errors_of_a_board_without_rank_1() -> list[str]:
    """Of its waits after one exchange of all, when rank 1 is late and when it is gone; and where there can be none."""
    with (
        Session(device="cpu") as session,
        mock.patch("evener.distributed.shm.slots.backstop", lambda seconds: seconds),
    ):
        assert session.world is not None
        board = Scoreboard(session.world, session.watchdog, 0.2)
        board.exchange([1.0]).wait()
        errors = []
        if session.rank == 0:
            pending = board.exchange([2.0])
            with pytest.raises(RankTimeoutError) as late:
                pending.wait()
            with (
                mock.patch("evener.distributed.shm.slots.has_died", return_value=True),
                pytest.raises(RankError) as dead,
            ):
                pending.wait()
            errors = [str(late.value), str(dead.value)]
        dist.barrier()
        with (
            mock.patch("platform.machine", return_value="aarch64"),
            pytest.raises(ConfigurationError) as refused,
        ):
            Scoreboard(session.world, session.watchdog, 0.2)
        return [*errors, str(refused.value)]


def test_errors_say_that_it_is_an_exchange_of_control(ranks: Any) -> None:
    (late, dead, refused), _ = ranks(2).run(errors_of_a_board_without_rank_1)
    assert "s in control exchange 2 through shared memory: rank 1 (process " in late
    assert "(control exchanges begun: 1)" in late
    assert dead.endswith("(control exchanges begun: 1), in control exchange 2 through shared memory")
    assert refused.startswith("no control exchange through shared memory: rank 0 runs on ")
    assert not any("all-reduce" in error.splitlines()[0] for error in (late, dead, refused))
