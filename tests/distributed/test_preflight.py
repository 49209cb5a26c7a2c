from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from evener.distributed import session
from evener.distributed.launch.launch import launch
from evener.distributed.preflight import JoinTerms, agree, disagreement
from evener.errors import ConfigurationError
from tests.distributed.processes import call

CUDA = JoinTerms(rank=0, host="a", device="cuda", meets_by="nccl", asked=None, evener="0.1.0")
CPU = replace(CUDA, rank=2, host="b", device="cpu", meets_by="gloo")


def of_all(all_terms: list[JoinTerms], world_size: int) -> list[str]:
    """What each rank raises, where they meet in one store."""
    store = HashStore()

    def joined(terms: JoinTerms) -> str:
        try:
            return "mixed" if agree(store, terms, world_size, 1.0) else "agreed"
        except (ConfigurationError, dist.DistError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(all_terms)) as threads:
        return list(threads.map(joined, all_terms))


def test_ranks_with_the_same_devices_agree() -> None:
    assert of_all([CUDA, replace(CUDA, rank=1), replace(CUDA, rank=2, asked="cuda")], 3) == ["agreed"] * 3


def test_ranks_that_took_different_devices_are_told_which_and_the_way_out() -> None:
    words = (
        "ConfigurationError: the ranks took different devices (no device was named, so each rank took what its host "
        "has): cuda on host a (rank 0, 1); cpu on host b (rank 2); give all of them --device cpu, leave out the hosts "
        "without a GPU, or say --device mixed to all, if these hosts are to train together"
    )
    assert of_all([CUDA, replace(CUDA, rank=1), CPU], 3) == [words] * 3


def test_ranks_that_were_told_so_are_refused_too() -> None:
    reason = disagreement([replace(CUDA, asked="cuda"), replace(CPU, asked="cpu")])
    assert reason is not None
    assert "as they were told" in reason


MIXED = replace(CUDA, asked="mixed")
AMD = replace(MIXED, rank=1, host="b", meets_by="rccl")


def test_hosts_of_different_kinds_run_together_if_all_are_told_to() -> None:
    cpu = replace(CPU, asked="mixed", host="c")
    assert of_all([MIXED, AMD, cpu], 3) == ["mixed"] * 3
    assert of_all([MIXED, replace(MIXED, rank=1, host="b")], 2) == ["agreed"] * 2, "they are alike"


def test_makers_that_cannot_meet_are_refused_like_other_kinds() -> None:
    reason = disagreement([CUDA, replace(AMD, asked=None)])
    assert reason is not None
    assert "cuda on host a (rank 0); cuda (rccl) on host b (rank 1)" in reason
    reason = disagreement([MIXED, replace(AMD, asked="cuda")])
    assert reason is not None
    assert "only some were told to mix them" in reason


def test_ranks_of_one_host_take_one_kind() -> None:
    other = replace(MIXED, rank=1, device="cpu", meets_by="gloo", place="same name, elsewhere")
    assert disagreement([MIXED, other]) is None
    reason = disagreement([MIXED, replace(other, place="")])
    assert reason is not None
    assert reason.startswith(
        "ranks of one host took different devices: cuda on host a (rank 0); cpu on host a (rank 1)"
    )


def test_ranks_of_one_host_that_took_one_card_are_refused() -> None:
    mine = replace(CUDA, card="GPU-1")
    assert disagreement([mine, replace(mine, rank=1, host="b"), replace(mine, rank=2, card="GPU-2")]) is None
    reason = disagreement([mine, replace(mine, rank=1), replace(mine, rank=2, card="GPU-2")])
    assert reason is not None
    assert reason.startswith(
        "several ranks took one card: GPU-1 on host a (rank 0, 1); start at most one for each"
    )
    assert disagreement([replace(CUDA, card=""), replace(CUDA, rank=1, card="")]) is None


def test_different_versions_are_refused() -> None:
    reason = disagreement([CPU, replace(CPU, rank=3, host="c", evener="0.2.0")])
    assert reason is not None
    assert "Evener 0.1.0 on host b (rank 2); Evener 0.2.0 on host c (rank 3)" in reason


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    assert "timeout" in of_all([CUDA], 2)[0].lower()


def test_terms_survive_the_wire() -> None:
    assert JoinTerms.from_json(CPU.to_json()) == CPU


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_device_for_all_is_no_reason(world_size: int) -> None:
    assert disagreement([CPU] * world_size) is None


def join_with_another_version() -> None:
    if os.environ["RANK"] == "1":
        session.evener_version = lambda: "9.9.9"
    with session.Session(device="cpu"):
        raise AssertionError("ranks of different versions have met")


def test_a_session_does_not_start_without_agreement() -> None:
    with pytest.raises(
        ConfigurationError, match=r"different versions: .*; Evener 9\.9\.9 on host \S+ \(rank 1\)"
    ):
        call(launch, join_with_another_version, processes=2, device="cpu")
