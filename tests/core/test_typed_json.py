from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from evener.core.typed_json import value_of


@dataclass(frozen=True)
class Part:
    name: str
    numbers: tuple[float, ...] = ()
    pair: tuple[int, str] | None = None
    by_name: dict[str, float] | None = None


def test_values_become_what_the_types_say() -> None:
    found = value_of(
        Part, {"name": "a", "numbers": [1, 2.5], "pair": [1, "x"], "by_name": {"b": 3}, "later": None}
    )
    assert found == Part("a", (1.0, 2.5), (1, "x"), {"b": 3.0})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "it is a NoneType"),
        ({}, "it has no name"),
        ({"name": None}, "name is a NoneType"),
        ({"name": "a", "numbers": [True]}, r"numbers\[0\] is a bool"),
        ({"name": "a", "numbers": [float("nan")]}, r"numbers\[0\] is not finite"),
        ({"name": "a", "numbers": [10**30]}, "too large"),
        ({"name": "a", "pair": [1]}, "pair has 1 entries"),
    ],
)
def test_others_are_named_with_their_place(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        value_of(Part, value)
