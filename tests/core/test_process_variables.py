from __future__ import annotations

import os

import pytest

from evener.core.process_variables import variable_set


@pytest.mark.parametrize("before", [None, "before"])
def test_a_variable_is_restored_also_after_an_error(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("EVENER_TRIED", raising=False)
    if before is not None:
        monkeypatch.setenv("EVENER_TRIED", before)
    with pytest.raises(KeyError, match="within"), variable_set("EVENER_TRIED", "within"):
        _ = {}[os.environ["EVENER_TRIED"]]
    assert os.environ.get("EVENER_TRIED") == before
