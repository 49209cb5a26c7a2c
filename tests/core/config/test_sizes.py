from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.config.sizes import UNITS, parse_limits, parse_size, size_words
from evener.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (" 512 MiB ", 2**29),
        ("4e9", 4 * 10**9),
        ("2TB", 2 * 10**12),
        ("7 B", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "-", "GB", "0", "0.1", "-1GB", "1 GX", "1G", "1,5GB", "inf", "nan", "1e999", "1GB2"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match="24GB"):
        parse_size(text)


@given(st.integers(1, 2**20), st.sampled_from(sorted(UNITS)))
def test_a_whole_number_of_units_is_exact(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * UNITS[unit]


def test_limits_are_one_for_all_or_one_for_each() -> None:
    assert parse_limits(None, 2) == [None, None]
    assert parse_limits("1KiB", 3) == [1024] * 3
    assert parse_limits("24GB,-,12GB", 3) == [24 * 10**9, None, 12 * 10**9]
    assert parse_limits("-", 2) == [None, None]
    for text in ("1,2", "1,2,3,4", "1,,2"):
        with pytest.raises(ConfigurationError):
            parse_limits(text, 3)


@given(st.integers(0, 2**60))
def test_words_say_the_size_to_three_digits(nbytes: int) -> None:
    said = size_words(nbytes)
    number, unit = said.split()
    assert abs(float(number) * UNITS[unit] - nbytes) <= 0.006 * nbytes
    assert len(number) <= 8


def test_large_sizes_are_not_rounded_as_floats_are() -> None:
    assert parse_size("295149PB") == 295149 * 10**15
