from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.core.config.exact_bits import REFUSED, REFUSED_VALUES, ExactBits
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError

GIVEN: dict[str, Any] = {
    "micro_batch": 8,
    "share_multiple_of": 2,
    "memory_limit": "1GB",
    "memory_limit_at": ("3:0:1GB",),
    "compress": "fp16",
    "update_in_backward": True,
    "optimizer_state": "8bit",
    "compile": "auto",
    "devices": "cpu:0,cpu:1",
}
"""A value for each setting that is refused."""


@pytest.mark.parametrize(
    ("batch_size", "grain", "grains_per_block"),
    [(1, 1, 1), (13, 1, 1), (64, 4, 1), (97, 6, 1), (256, 16, 1), (1024, 16, 2), (4096, 16, 8)],
)
def test_defaults_follow_from_the_batch(batch_size: int, grain: int, grains_per_block: int) -> None:
    bits = ExactBits.chosen(batch_size)
    assert bits == ExactBits(grain, grains_per_block)
    assert bits.blocks(batch_size) >= min(16, batch_size)


def test_what_is_given_stays() -> None:
    assert ExactBits.chosen(64, 5, 3) == ExactBits(5, 3)
    assert ExactBits.chosen(64, grain=16) == ExactBits(16, 1)
    assert ExactBits(4, 2).words == "grains of 4 samples, blocks of 2 grains"


def test_a_grain_larger_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="grain is 65, and a batch has 64 samples: make grain"):
        ExactBits.chosen(64, 65)
    with pytest.raises(ConfigurationError, match="grain is 65"):
        RunConfig(exact="bits", grain=65, batch_size=64)


def test_every_refused_setting_is_given_here() -> None:
    assert [name for name, *_ in REFUSED] == list(GIVEN)


@pytest.mark.parametrize("name", GIVEN)
def test_settings_that_depend_on_the_division_are_refused(name: str) -> None:
    RunConfig(**{name: GIVEN[name]})
    with pytest.raises(ConfigurationError, match=rf"exact=bits does not go with {name}=.*; |: ") as caught:
        RunConfig(exact="bits", **{name: GIVEN[name]})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values, _ in REFUSED_VALUES for value in values]
)
def test_values_that_depend_on_the_division_are_refused(name: str, value: str) -> None:
    RunConfig(**{name: value})
    with pytest.raises(ConfigurationError, match=f"exact=bits does not go with {name}={value}: "):
        RunConfig(exact="bits", **{name: value})


@pytest.mark.parametrize("given", [{"grain": 4}, {"block": 2}, {"batch_norm": "grain"}])
def test_what_would_do_nothing_is_refused(given: dict[str, Any]) -> None:
    RunConfig(exact="bits", **given)
    with pytest.raises(
        ConfigurationError, match="would do nothing: a batch is cut into grains with exact=bits"
    ):
        RunConfig(**given)


@pytest.mark.parametrize(("name", "value"), [("grain", 0), ("block", 0), ("grain", 2.5), ("exact", "bit")])
def test_values_that_cannot_work(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} is {value!r}; it must be"):
        RunConfig(**{"exact": "bits", name: value})


def test_paths_and_the_rest_go_with_bits() -> None:
    config = RunConfig(exact="bits", batch_norm="grain", clip_norm=1.0, precision="bf16", run_dir=Path("x"))
    assert (config.exact, config.grain, config.block) == ("bits", None, None)
