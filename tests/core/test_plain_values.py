"""What can be written into a checkpoint can be read again, or is refused by its name."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.core.plain_values import as_plain, unreadable


def test_numbers_of_numpy_become_those_of_python() -> None:
    given = {"lr": np.float64(0.1), "sides": [(np.int64(2), "a")], np.int64(3): np.bool_(True)}
    assert repr(as_plain(given)) == "{'lr': 0.1, 'sides': [(2, 'a')], 3: True}"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, 2.0, None, "b", torch.zeros(1), Counter([1]), {2}, torch.float16]}, ""),
        (OrderedDict(a=1j, b=torch.nn.Parameter(torch.zeros(1))), ""),
        ({"a": {"b": [0, deque()]}}, "the state.a.b[1] is of type deque, which a checkpoint cannot hold"),
        ({"a": np.arange(2)}, "the state.a is of type ndarray"),
        ({Path("a"): 1}, "a key of the state is of type PosixPath"),
        ([lambda: None], "the state[0] is of type function"),
    ],
)
def test_what_cannot_be_read_again_is_named(value: Any, words: str) -> None:
    found = unreadable(value)
    assert found.startswith(words)
    assert bool(found) == bool(words)
    if not words:
        file = io.BytesIO()
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
