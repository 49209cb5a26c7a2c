from __future__ import annotations

import pytest
import torch

from evener.distributed import environment
from evener.distributed.environment import (
    check_processes,
    default_processes,
    detect,
    first_host,
    refuse_mpi,
    tasks_per_node,
    usable_cores,
)
from evener.errors import ConfigurationError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29501",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],cpu1",
    "SLURM_JOB_ID": "123456",
}


def test_a_process_without_a_launcher_is_alone() -> None:
    place = detect({})
    assert (place.rank, place.world_size, place.local_rank, place.launcher) == (0, 1, 0, "single")


def test_one_of_several_processes_of_mpi_is_no_process_without_a_launcher() -> None:
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
    with pytest.raises(ConfigurationError, match=r"one of 4 processes .* unset OMPI_COMM_WORLD_SIZE, for"):
        refuse_mpi(mpi)
    refuse_mpi({"OMPI_COMM_WORLD_SIZE": "1"})
    refuse_mpi(mpi | TORCHRUN)
    refuse_mpi({"PMI_SIZE": "7"} | SLURM)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_PORT is 99999; a port is a number from 1 to 65535"):
        detect(TORCHRUN | {"MASTER_PORT": "99999"})


def test_torchrun_variables_are_read() -> None:
    place = detect(TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 6, 1, 2)
    assert (place.node, place.master_addr, place.master_port) == (2, "head", 29501)


def test_torchrun_goes_before_slurm() -> None:
    assert detect(SLURM | TORCHRUN).launcher == "torchrun"


def test_slurm_variables_are_read_and_all_tasks_meet_at_one_place() -> None:
    last = detect(SLURM)
    assert (last.rank, last.world_size, last.local_rank, last.local_world_size) == (6, 7, 0, 1)
    first = detect(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert first.local_world_size == 2
    assert (first.master_addr, first.master_port) == (last.master_addr, last.master_port)
    assert first.master_addr == "gpu07"
    assert first.master_port is not None
    assert 15000 <= first.master_port < 35000


def test_a_slurm_task_can_be_told_in_torchruns_variables() -> None:
    told = detect(detect(SLURM).variables)
    assert (told.rank, told.world_size, told.local_rank, told.local_world_size) == (6, 7, 0, 1)
    assert (told.node, told.master_addr, told.launcher) == (3, "gpu07", "torchrun")


def test_two_steps_of_one_job_meet_at_different_ports() -> None:
    ports = {detect(SLURM | {"SLURM_STEP_ID": step}).master_port for step in "0123"}
    assert len(ports) == 4


def test_a_shell_inside_an_allocation_is_no_rank() -> None:
    assert detect(SLURM | {"SLURM_JOB_NAME": "interactive"}).world_size == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "6"}, "rank 6 of 6"),
        ({"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"LOCAL_WORLD_SIZE": "7"}, "of 7"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"RANK": ""}, "RANK is ''"),
    ],
)
def test_contradictions_are_refused_with_the_values_seen(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        detect(TORCHRUN | change)


def test_half_of_torchruns_variables_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"WORLD_SIZE is not set; .*unset them to run as one process"
    ):
        detect({"RANK": "0"})


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("1(x2)", [1, 1])]
)
def test_slurms_short_form_of_counts(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_slurms_short_form_refuses_what_it_is_not() -> None:
    with pytest.raises(ConfigurationError, match="two"):
        tasks_per_node("two")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha"),
        ("n[01-03,07],m2", "n01"),
        ("n[5,7-9]", "n5"),
        ("a[1-2]-b[3-4]", "a1-b3"),
        ("n[3-4].site.org", "n3.site.org"),
    ],
)
def test_first_host_of_slurms_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_default_on_the_cpu_is_a_core_each_up_to_four() -> None:
    assert default_processes("cpu") == min(4, usable_cores())


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (2.0, 2), (2.5, 3), (0.25, 1), (64.0, 8)])
def test_a_containers_quota_counts_as_cores(
    quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "allowed_cores", lambda: 8)
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    assert usable_cores() == usable
    assert default_processes("cpu") == min(4, usable)


def test_default_on_gpus_is_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert default_processes("cuda") == 6


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_processes(2, "cuda")
    with pytest.raises(ConfigurationError, match="asked for 4 processes on cuda, 2 GPUs here"):
        check_processes(4, "cuda")
    check_processes(4, "cpu")


def test_several_ranks_may_share_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match="several ranks on a card: EVENER__RANKS_PER_CARD=3"):
        check_processes(5, "cuda")
    monkeypatch.setenv(environment.RANKS_PER_CARD, "3")
    check_processes(6, "cuda")
    with pytest.raises(
        ConfigurationError, match="asked for 7 processes on cuda, 2 GPUs here; ask for at most 6"
    ):
        check_processes(7, "cuda")
    for wrong, words in (("0", "at least 1"), ("many", "not a number")):
        monkeypatch.setenv(environment.RANKS_PER_CARD, wrong)
        with pytest.raises(ConfigurationError, match=words):
            check_processes(2, "cuda")


def test_more_processes_than_the_cores_can_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 2)
    for few in (1, 8, 128):
        check_processes(few, "cpu")
    with pytest.raises(
        ConfigurationError, match="asked for 100000 processes on 2 usable cores; ask for at most 128"
    ):
        check_processes(100_000, "cpu")


def test_no_processes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="asked for 0"):
        check_processes(0, "cpu")


def test_default_device_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert environment.default_device() == "cuda"
