from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from evener.runtime.board import Board, quickest
from evener.runtime.session import Session


def exchange_many(rounds: int) -> list[list[list[float]]]:
    with Session(device="cpu") as session:
        assert session.world is not None
        board = Board(session.world, session.watchdog, 10)
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


def kind_of_channel() -> str:
    with Session(device="cpu") as session:
        return type(quickest(session)).__name__


def test_ranks_of_one_host_get_a_board(ranks: Any) -> None:
    assert ranks(2).run(kind_of_channel) == ["Board", "Board"]
