"""Tensors in nested state, taken out and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evener.components.optim.nested_state import leaves_of, with_tensors, without_tensors


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def test_nested_state_comes_back() -> None:
    one, two, three = (torch.full((n,), n) for n in (1, 2, 3))
    state = {"step": 3, "one": one, "sides": [two, None, ("text", {0: three, "size": 2.5})], "empty": []}
    tensors, rest = dict[str, Any](), dict[str, Any]()
    for key, value in state.items():
        tensors |= {path: leaf for path, leaf in leaves_of(key, value) if is_tensor(leaf)}
        rest[key] = without_tensors(key, value, is_tensor)
    assert list(tensors) == ["one", "sides#0", "sides#2#1#0"]
    assert not any(is_tensor(leaf) for key, value in rest.items() for _, leaf in leaves_of(key, value))
    found = with_tensors(rest | tensors)
    assert found.keys() == state.keys()
    assert found["one"] is one
    assert found["sides"][0] is two
    assert found["sides"][1:] == [None, ("text", {0: three, "size": 2.5})]
    assert found["empty"] == []
