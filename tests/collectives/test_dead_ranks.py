"""A rank that dies or stops in the middle is named by all others, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import fork_of_imports
from tests.tiers import NIGHTLY, SLOW, spread

pytestmark = pytest.mark.slow

WORLD_SIZE = 3
VICTIM = 1
TIMEOUT_SECONDS = 2.0


def _rank(rank: int, store: str, name: str, blow: int, connection: Any) -> None:
    import torch.distributed as dist

    from evener.collectives.registry import make

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=30),
    )
    all_reduce = make(name, timeout_seconds=TIMEOUT_SECONDS)
    tensor = torch.ones(1000)
    all_reduce(tensor).wait()
    if rank == VICTIM:
        os.kill(os.getpid(), blow)
    errors = []
    for _ in range(2):
        try:
            all_reduce(tensor).wait()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    all_reduce.close()
    connection.send(errors)
    os._exit(0)


def errors_of_survivors(tmp_path: Path, name: str, blow: int) -> dict[int, list[str]]:
    """The errors of the two calls after the blow, of every rank that was not hit."""
    pipes = [multiprocessing.Pipe() for _ in range(WORLD_SIZE)]
    processes = [
        fork_of_imports(_rank, rank, str(tmp_path / "store"), name, blow, theirs, daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        errors = {}
        for rank in range(WORLD_SIZE):
            if rank != VICTIM:
                assert pipes[rank][0].poll(60), f"rank {rank} hangs"
                errors[rank] = pipes[rank][0].recv()
        return errors
    finally:
        for process in processes:
            process.kill()
            process.join()
        for ours, theirs in pipes:
            ours.close()
            theirs.close()


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "evener" in path.name}


def test_a_rank_that_was_killed_is_said_to_have_died(tmp_path: Path) -> None:
    before = shared_files()
    for errors in errors_of_survivors(tmp_path, "shared-memory", signal.SIGKILL).values():
        first, second = errors
        assert first.startswith("RankError: rank 1 (process ")
        assert "died" in first
        assert second.startswith("RankError: an earlier all-reduce")
        assert "rank 1" in second
    assert shared_files() == before


def test_a_rank_that_stopped_is_said_to_be_stopped(tmp_path: Path) -> None:
    for errors in errors_of_survivors(tmp_path, "shared-memory", signal.SIGSTOP).values():
        assert errors[0].startswith("RankTimeoutError: waited ")
        assert "rank 1 (process " in errors[0]
        assert "is stopped" in errors[0]
        assert "all-reduces begun: 1" in errors[0]
        assert "rank 0" not in errors[0]
        assert "rank 2" not in errors[0]


@pytest.mark.parametrize("blow", spread([signal.SIGSTOP, signal.SIGKILL], SLOW, NIGHTLY))
def test_messages_that_do_not_come_lead_to_the_missing_rank(tmp_path: Path, blow: int) -> None:
    """Gloo may see a closed connection or time out, on some ranks after others; the roll call finds the rank."""
    for errors in errors_of_survivors(tmp_path, "ring", blow).values():
        assert errors[0].startswith(("RankError", "RankTimeoutError"))
        assert "broke off: rank 1;" in errors[0] or "ended without rank 1:" in errors[0]
