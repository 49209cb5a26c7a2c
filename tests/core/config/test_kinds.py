"""Values of a kind that a setting does not take."""

from pathlib import Path
from typing import Any

import pytest

from evener.core.config.run_config import Recipe, RunConfig
from evener.errors import ConfigurationError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overwrite": "no"}, "overwrite is 'no'; it must be true or false"),
        ({"lean": 1}, "lean is 1; it must be true or false"),
        ({"precision_of": ["head=fp32", 3]}, "it must be a list of texts"),
        ({"clip_norm": "1.0"}, "clip_norm is '1.0'; it must be a number"),
        ({"clip_norm": True}, "clip_norm is True; it must be a number"),
        ({"timeout_seconds": "5"}, "timeout_seconds is '5'; it must be a number"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"save_mode": None}, "save_mode is None; it must be a text"),
        ({"device": 0}, "device is 0; it must be a text"),
        ({"run_dir": 3}, "run_dir is 3; it must be a path"),
        ({"mesh": ""}, "mesh is empty: leave it out"),
        ({"allreduce": " "}, "allreduce is empty"),
        ({"keep_best": ""}, "keep_best is empty"),
        ({"override": ("lr", "")}, "override is empty"),
    ],
)
def test_a_value_of_another_kind_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RunConfig(**settings)


def test_what_stands_for_a_kind_is_taken(tmp_path: Path) -> None:
    one, other = Recipe(), Recipe()
    taken = RunConfig(clip_norm=1, run_dir=str(tmp_path), override=["lr"], strategy=(one, other))  # type: ignore[arg-type]
    assert taken.clip_norm == 1
    assert taken.run_dir == tmp_path
    assert RunConfig(override="momentum").override == ("momentum",)  # type: ignore[arg-type]
