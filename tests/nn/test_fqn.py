from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.nn.fqn import clean_name, clean_names, unwrapped


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("0.weight", "0.weight"),
        ("_orig_mod.0.weight", "0.weight"),
        ("0._orig_mod._checkpoint_wrapped_module.weight", "0.weight"),
        ("block._orig_mod", "block"),
        ("_orig_mod", ""),
        ("module.own_orig_mod.weight", "module.own_orig_mod.weight"),
    ],
)
def test_clean_name(name: str, clean: str) -> None:
    assert clean_name(name) == clean


def test_the_users_own_module_is_behind_all_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert unwrapped(model) is model
    compiled = torch.compile(model, backend="eager")
    assert unwrapped(compiled) is model
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = compiled
    assert unwrapped(wrapper) is model
    assert [name for name, _ in clean_names(wrapper)] == ["0.weight", "0.bias"]
