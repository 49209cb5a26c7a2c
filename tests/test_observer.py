"""Who is told what of a run."""

from __future__ import annotations

from typing import Any

import pytest

from evener.observer import Observer, Observers


class Noting(Observer):
    def __init__(self, told: list[str], name: str, fails: bool = False) -> None:
        self._told, self._name, self._fails = told, name, fails

    def start(self, run: Any) -> None:
        if self._fails:
            raise OSError("no room")
        self._told.append(f"{self._name} starts")

    def end(self, summary: Any) -> None:
        self._told.append(f"{self._name} ends")


def test_those_end_that_have_started() -> None:
    told: list[str] = []
    observers = Observers(
        [Noting(told, "first"), Noting(told, "second", fails=True), Noting(told, "third")], 0
    )
    with pytest.raises(OSError, match="no room"):
        observers.start(None)  # type: ignore[arg-type]
    observers.end(None)
    assert told == ["first starts", "first ends"]
