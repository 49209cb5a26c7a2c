from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.errors import ConfigurationError
from evener.training.engine import Engine
from tests.engines import copied, engine_of


def bits(**settings: Any) -> Engine:
    return engine_of("plain", exact="bits", dtype="float32", **settings)


def test_another_grain_is_refused_with_the_one_of_the_checkpoint(tmp_path: Path) -> None:
    with bits(grain=3) as engine:
        engine.step(next(engine.batches()))
        saved = engine.state_dict()
        engine.save(tmp_path)
    for settings in ({"grain": 4}, {"grain": 3, "block": 2}):
        with bits(**settings) as other:
            before = copied(other)
            for load in (
                lambda other=other: other.load_state_dict(saved),
                lambda other=other: other.load(tmp_path),
            ):
                with pytest.raises(
                    ConfigurationError, match=r"grain 3 and block 1, .*--grain, --block"
                ) as caught:
                    load()
                assert "give grain=3 and block=1" in str(caught.value)
            assert all(value.equal(before[name]) for name, value in copied(other).items()), (
                "nothing was loaded"
            )


def test_the_same_grain_goes_on_and_sums_too(tmp_path: Path) -> None:
    with bits(grain=3) as engine:
        engine.step(next(engine.batches()))
        engine.save(tmp_path)
    told: list[str] = []
    with bits(grain=3) as other:
        other.load(tmp_path, told.append)
    assert told == []
    with engine_of("plain", dtype="float32") as other:
        other.load(tmp_path, told.append)
    assert told == ["the run goes on with exact sums, and was begun with bits"]


def test_another_kind_of_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bits() as engine:
        engine.step(next(engine.batches()))
        engine.save(tmp_path)
    monkeypatch.setattr("evener.training.state.run_state.words_of", lambda *_: "exact in bits: on an abacus")
    told: list[str] = []
    with bits() as other:
        other.load(tmp_path, told.append)
    (message,) = told
    assert message.startswith(
        "the run goes on exact in bits: on an abacus, and was begun exact in bits: grains of 1"
    )
    assert message.endswith("which may round otherwise")
