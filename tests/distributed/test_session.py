from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from evener.core.config.run_config import RunConfig
from evener.core.phase_marks import process_watchdogs
from evener.distributed.environment import Environment
from evener.distributed.session import Session, agent_watchdog, current_watchdog, threads_per_rank
from evener.errors import ConfigurationError, RankError, RankTimeoutError
from tests.cpp_errors import throw


def exchange_numbers() -> dict[str, Any]:
    with Session(device="cpu", timeout_seconds=30) as session:
        strange = session.control.exchange([session.rank, math.nan, -0.0, 0.1])
        overlapping = session.control.exchange([10.0 * session.rank, 1.0, 2.0, 3.0])
        narrow = session.control.exchange([float(session.rank)])
        values = {"narrow": narrow.wait(), "overlapping": overlapping.wait(), "strange": strange.wait()}
        values["again"] = [session.control.exchange([float(i + session.rank)]).wait() for i in range(5)]
        return values


def exchange_objects() -> list[Any]:
    with Session(device="cpu", timeout_seconds=30) as session:
        session.control.barrier()
        mine = {"rank": session.rank, "who": "x" * (session.rank + 1)}
        gathered, to_one = session.control.gather_objects(mine), session.control.gather_to(mine, rank=1)
        return [gathered, session.control.broadcast_object(f"from {session.rank}", src=1), to_one]


def twice_in_an_existing_group() -> tuple[bool, int, bool]:
    for _ in range(2):
        with Session(device="cpu", timeout_seconds=30) as session:
            total = torch.ones(3)
            dist.all_reduce(total, group=session.world)
            assert current_watchdog() is session.watchdog
    return dist.is_initialized(), int(total[0]), current_watchdog() is None


def explain_a_lost_connection() -> str:
    with Session(device="cpu", timeout_seconds=1) as session:
        if session.rank == 1:
            session.watchdog.close()
            session.control.barrier()
            return ""
        try:
            with session.watchdog.wait("all-reduce", step=41):
                throw(
                    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3")
                )
        except RankError as error:
            return str(error)
        finally:
            session.control.barrier()


def test_every_rank_reads_the_same_values_by_rank(ranks: Any) -> None:
    first, second = ranks(2).run(exchange_numbers)
    assert repr(first) == repr(second)
    assert first["narrow"] == [[0.0], [1.0]]
    assert first["overlapping"] == [[0.0, 1.0, 2.0, 3.0], [10.0, 1.0, 2.0, 3.0]]
    assert first["again"] == [[[i + 0.0], [i + 1.0]] for i in range(5)]
    rank, nan, zero, tenth = first["strange"][1]
    assert (rank, tenth) == (1.0, 0.1)
    assert math.isnan(nan)
    assert math.copysign(1, zero) == -1


def test_objects_reach_every_rank(ranks: Any) -> None:
    everything = [{"rank": 0, "who": "x"}, {"rank": 1, "who": "xx"}]
    assert ranks(2).run(exchange_objects) == [
        [everything, "from 1", None],
        [everything, "from 1", everything],
    ]


def test_a_group_that_was_there_is_used_and_left(ranks: Any) -> None:
    assert ranks(2).run(twice_in_an_existing_group) == [(True, 2, True)] * 2


def test_a_group_that_was_there_moves_tensors_of_the_device() -> None:
    """As one of NCCL alone, where a run is to be on the CPU."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match="moves tensors of cuda, not of cpu: leave") as raised:
            Session(device="cpu").__enter__()
        assert "set device to 'cuda'" in str(raised.value)
        assert current_watchdog() is None
    finally:
        dist.destroy_process_group()


def test_a_lost_connection_names_the_rank_that_left(ranks: Any) -> None:
    message, _ = ranks(2).run(explain_a_lost_connection)
    assert message.startswith("rank 1 has left; but rank 0 waits in all-reduce of step 41")
    first, second = message.splitlines()[1:3]
    assert "rank 1" in first
    assert "has left on its own" in first
    assert "rank 0" in second


def test_one_rank_alone_has_the_same_things_without_a_group() -> None:
    with Session(device="cpu") as session:
        assert (session.rank, session.world_size, session.world) == (0, 1, None)
        assert session.control.exchange([1.0, 2.0]).wait() == [[1.0, 2.0]]
        assert session.control.gather_objects("x") == ["x"]
        assert session.control.gather_to("x", rank=0) == ["x"]
        assert session.control.broadcast_object("y") == "y"
        assert session.patient_group() is None
        session.control.barrier()
        session.watchdog.progress("step 1")
        assert "rank 0" in session.watchdog.report()
    assert not dist.is_initialized()
    assert current_watchdog() is None


def alone_among_ranks() -> tuple[int, int, bool, tuple[int, ...], bool]:
    with Session(device="cpu", timeout_seconds=60) as session:
        with Session(device="cpu", timeout_seconds=60, environment=Environment()) as alone:
            found = alone.rank, alone.world_size, alone.world is None, alone.mesh.data.team
        return *found, session.control.gather_objects(session.rank) == [0, 1]


def test_a_rank_that_is_said_to_be_alone_is_so_among_others(ranks: Any) -> None:
    """And the group that it keeps out of is left as it was."""
    assert ranks(2).run(alone_among_ranks) == [(0, 1, True, (0,), True)] * 2


def test_threads_are_set_for_the_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    with Session(device="cpu"):
        assert torch.get_num_threads() == threads_per_rank(1)
    assert torch.get_num_threads() == before


def test_threads_that_the_user_set_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Session(device="cpu"):
        assert torch.get_num_threads() == 1


def test_no_rank_is_left_without_a_thread() -> None:
    assert threads_per_rank(10_000) == 1


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="meta"), Session(device="meta"):
        pass


def test_ranks_without_a_meeting_place_are_refused() -> None:
    place = Environment(rank=0, world_size=2, local_rank=0, local_world_size=2)
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"), Session(device="cpu", environment=place):
        pass


def test_a_process_of_mpi_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="would train alone"), Session(device="cpu"):
        pass


def sums_in_the_patient_group() -> tuple[list[float], int]:
    before = set(distributed_c10d._world.pg_map)
    with Session(device="cpu", timeout_seconds=30) as session:
        sums = []
        for _ in range(2):
            total = torch.ones(1)
            dist.all_reduce(total, group=session.patient_group())
            sums.append(total.item())
        assert session.patient_group() is session.patient_group()
    return sums, len(set(distributed_c10d._world.pg_map) - before)


def test_the_patient_group_is_one_of_all_ranks_and_ends_with_the_session(ranks: Any) -> None:
    assert ranks(2).run(sums_in_the_patient_group) == [([2.0, 2.0], 0)] * 2


def test_a_rank_that_never_starts_ends_the_wait() -> None:
    place = Environment(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=1
    )
    with (
        pytest.raises(RankTimeoutError, match=r"rank 1 of 2 found no run at 127\.0\.0\.1:1"),
        Session(device="cpu", environment=place, timeout_seconds=0.1),
    ):
        pass


@pytest.fixture
def launched() -> Iterator[None]:
    """Makes this process that of a launcher with a limit of 7 seconds."""
    watchdog = agent_watchdog(Environment(), timeout_seconds=7)
    yield
    watchdog.close()
    process_watchdogs.remove(watchdog)


@pytest.mark.usefixtures("launched")
def test_the_limit_of_the_launcher_holds_where_none_was_given() -> None:
    sent = pickle.loads(pickle.dumps(RunConfig()))  # as the launcher sends settings to its ranks
    for session in (Session(device="cpu"), Session(device="cpu", timeout_seconds=sent.timeout_seconds)):
        with session:
            assert session.watchdog.timeout_seconds == 7


@pytest.mark.usefixtures("launched")
def test_a_limit_that_was_given_holds_even_if_it_is_as_long_as_the_default() -> None:
    with Session(device="cpu", timeout_seconds=float(RunConfig().timeout_seconds)) as session:
        assert session.watchdog.timeout_seconds == 300
