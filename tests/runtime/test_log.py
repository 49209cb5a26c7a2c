from __future__ import annotations

import pytest

from evener.runtime.log import say, warn


@pytest.mark.parametrize(("rank", "out"), [("0", "hello\n"), ("1", "")])
def test_only_rank_0_speaks(
    rank: str, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    say("hello")
    assert capsys.readouterr().out == out
    with pytest.warns(UserWarning, match=rf"\[rank {rank}\] careful"):
        warn("careful")
