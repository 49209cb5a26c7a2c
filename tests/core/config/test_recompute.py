"""How much may be taken, in words and in bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from evener.core.config.recompute import Recompute
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError

GB = 10**9


@pytest.mark.parametrize(
    ("text", "is_budget", "part", "sizes"),
    [
        ("blocks", False, None, [None, None]),
        ("60%", True, 0.6, [None, None]),
        ("62.5 %", True, 0.625, [None, None]),
        ("8GB", True, None, [8 * GB, 8 * GB]),
        ("8GB,4GB", True, None, [8 * GB, 4 * GB]),
        ("8GB,-", True, None, [8 * GB, None]),
    ],
)
def test_a_budget_is_a_part_or_a_size(text: str, is_budget: bool, part: Any, sizes: Any) -> None:
    found = Recompute.parse(text)
    assert (found.is_budget, found.part, found.sizes(2)) == (is_budget, part, sizes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "some",
            "recompute is 'some'; it must be blocks, a part of the peak such as 60%, a size such as 8GB",
        ),
        ("0%", "above 0% and below 100%"),
        ("100%", "above 0% and below 100%"),
        ("-5%", "it must be blocks"),
    ],
)
def test_anything_else_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        RunConfig(recompute=text)


def test_a_budget_of_compiled_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="which is measured operator by operator, and compile hides these"
    ):
        RunConfig(recompute="60%", compile="blocks")
    RunConfig(recompute="blocks", compile="blocks")


def test_there_is_a_size_for_each_rank() -> None:
    with pytest.raises(ConfigurationError, match="has 2 limits for 3 ranks"):
        Recompute.parse("8GB,4GB").budgets([1, 1, 1], [0, 0, 0], [0, 0, 0])


@pytest.mark.parametrize(
    ("text", "peaks", "least", "stages", "expected"),
    [
        ("60%", [100, 100], [10, 10], [0, 0], [60, 60]),
        (
            "60%",
            [100, 20],
            [10, 15],
            [0, 0],
            [60, 60],
        ),  # of the largest peak, for they compute the same blocks
        ("60%", [100, 50], [10, 40], [0, 1], [60, 40]),  # what a stage needs at least
        ("60%", [100, 90], [10, 80], [0, 1], [60, 60]),  # but no more than another has: it cannot be met
        ("8,-", [100, 90], [10, 80], [0, 0], [8, 90]),
    ],
)
def test_budgets_of_ranks(text: str, peaks: Any, least: Any, stages: Any, expected: Any) -> None:
    assert Recompute.parse(text).budgets(peaks, least, stages) == expected
