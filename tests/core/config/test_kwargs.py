"""Settings as keyword arguments, typed for editors and mypy."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import fields
from pathlib import Path

import pytest
from mypy import api

import evener
from evener.core.config.kwargs import LoopSettings, Settings
from evener.core.config.run_config import RunConfig
from tests.writing_settings import TARGET, written

CALL = """
from typing import Unpack
from evener.core.config.kwargs import Settings

def fit(task: str, **settings: Unpack[Settings]) -> None: ...

fit("digits", {call})
"""


def test_the_file_is_what_the_settings_are() -> None:
    assert TARGET.read_text() == written(), "run python -m tests.writing_settings"
    assert set(Settings.__annotations__) == {entry.name for entry in fields(RunConfig)}
    assert LoopSettings.__annotations__.items() <= Settings.__annotations__.items()


@pytest.mark.parametrize(
    ("function", "named"),
    [
        *((evener.fit, Settings), (evener.verify, Settings), (evener.estimate_memory, Settings)),
        *((evener.Engine, Settings), (evener.prepare, LoopSettings)),
    ],
)
def test_functions_that_take_settings_say_so(function: object, named: type) -> None:
    (settings,) = [
        parameter
        for parameter in inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD
    ]
    assert settings.annotation == f"Unpack[{named.__name__}]"
    assert typing.is_typeddict(named)


def test_mypy_finds_a_misspelt_setting(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(CALL.format(call='epochs=3, run_dir="runs/a", precision_of=("head=fp32",)'))
    bad.write_text(CALL.format(call="epoch=3") + 'fit("digits", batch_size="many")\n')
    own = [str(TARGET), str(TARGET.with_name("run_config.py"))]
    arguments = ["--follow-imports=skip", f"--cache-dir={tmp_path}", "--no-error-summary", "--strict"]
    found, _, _ = api.run([*arguments, "--config-file=", *own, str(good), str(bad)])
    wrong = [line for line in found.splitlines() if "good.py" in line or "bad.py" in line]
    assert len(wrong) == 2, found
    assert 'Unexpected keyword argument "epoch"' in wrong[0]
    assert '"batch_size"' in wrong[1]
    assert all("bad.py" in line for line in wrong)


def test_what_prepare_gives_back_keeps_its_types(tmp_path: Path) -> None:
    calls = tmp_path / "calls.py"
    calls.write_text(
        "from evener.training.prepare.prepare import prepare\n"
        'reveal_type(prepare(1, balance="auto"))\n'
        "reveal_type(prepare(1, True, b'', 2.0))\n"
    )
    own = [str(TARGET), str(TARGET.parents[2] / "training/prepare/prepare.py")]
    arguments = ["--follow-imports=skip", f"--cache-dir={tmp_path}", "--no-error-summary", "--config-file="]
    found, _, _ = api.run([*arguments, *own, str(calls)])
    said = [line.partition("Revealed type is ")[2] for line in found.splitlines() if "calls.py" in line]
    assert [re.sub(r"builtins\.|Literal\[[^]]*\]\?", "", line) for line in said] == [
        '"int"',
        '"tuple[int, bool, bytes, float]"',
    ], found
