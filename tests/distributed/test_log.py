from __future__ import annotations

import pytest

from evener.distributed.log import warn


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_warning_says_which_rank_warns(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=rf"\[rank {rank}\] careful"):
        warn("careful")
