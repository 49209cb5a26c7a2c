from __future__ import annotations

import os
import resource

import pytest
import torch.distributed as dist

from evener.errors import RankError
from evener.runtime.descriptors import shortage_words
from evener.runtime.launch import launch
from evener.runtime.session import Session


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
    assert shortage_words() == ""
    assert shortage_words(2**22 + 1) == ""


def test_a_native_error_for_want_of_descriptors_says_so() -> None:
    with pytest.raises(RankError, match="raise the limit") as raised:
        launch(makes_a_group_without_descriptors, processes=2, device="cpu", timeout_seconds=60)
    assert "test_descriptors.py" in str(raised.value)
    assert "dist.new_group()" in str(raised.value)
