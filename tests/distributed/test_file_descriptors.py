from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch.distributed as dist

from evener.distributed import file_descriptors as descriptors
from evener.distributed.file_descriptors import make_room, shortage_message
from evener.distributed.launch.launch import launch
from evener.distributed.session import Session
from evener.errors import ConfigurationError, RankError
from tests.distributed.processes import call


def use_all() -> list[int]:
    """Descriptors, until there are no more."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    found: list[int] = []
    try:
        while True:
            found.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return found


def makes_a_group_without_descriptors() -> None:
    with Session(device="cpu"):
        use_all()
        dist.new_group()


def test_a_process_that_may_open_more_has_nothing_said_of_it() -> None:
    assert shortage_message() == ""
    assert shortage_message(2**22 + 1) == ""


def test_a_native_error_for_want_of_descriptors_says_so() -> None:
    with pytest.raises(RankError, match="raise the limit") as raised:
        call(launch, makes_a_group_without_descriptors, processes=2, device="cpu", timeout_seconds=60)
    assert Path(__file__).name in str(raised.value)
    assert "dist.new_group()" in str(raised.value)


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("ranks", "limits", "raised"),
    [
        (2, (1024, 4096), None),
        (2, (INFINITE, INFINITE), None),
        (2, (20, 4096), 1024),
        (2, (20, INFINITE), 1024),
        (2, (20, 60), 60),
        (256, (1024, INFINITE), 3152),
        (256, (1024, 2000), 2000),
    ],
)
def test_the_launcher_raises_a_limit_that_is_too_low(
    monkeypatch: pytest.MonkeyPatch, ranks: int, limits: tuple[int, int], raised: int | None
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda kind, found: made.append(found))
    make_room(ranks)
    assert made == ([] if raised is None else [(raised, limits[1])])


def test_a_hard_limit_that_is_too_low_is_refused_before_a_rank_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: (20, 24))
    with pytest.raises(ConfigurationError, match=r"24 files open here, and 2 ranks need 52 each.*ulimit -Hn"):
        launch(use_all, processes=2, device="cpu")
