from __future__ import annotations

from typing import Any

import pytest

from evener.core.call_by_name import called_with, names_taken
from evener.errors import ConfigurationError

OFFERED = {"a": 1, "b": 2}


class Bare:
    pass


class OfOne:
    def __init__(self, b: int) -> None:
        self.got = b


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda: None, set()),
        (lambda a: a, {"a"}),
        (lambda *, b, c=3: (b, c), {"b"}),
        (lambda **settings: settings, {"a", "b"}),
        (lambda a, *rest: rest, {"a"}),
        (Bare, set()),
        (OfOne, {"b"}),
    ],
)
def test_a_function_is_given_what_it_names(function: Any, names: set[str]) -> None:
    assert names_taken(function, OFFERED) == names
    called_with(function, OFFERED)


def test_what_is_given_has_the_offered_value() -> None:
    assert called_with(lambda b, a=5: (a, b), OFFERED) == (1, 2)
    assert called_with(OfOne, OFFERED).got == 2


@pytest.mark.parametrize("function", [lambda color: None, lambda color, /, a: None, lambda a, *, color: None])
def test_what_it_cannot_do_without_is_named(function: Any) -> None:
    with pytest.raises(ConfigurationError, match="it needs 'color'; what it may name is a, b"):
        called_with(function, OFFERED)
