from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.components.memory_limits import fits as room
from evener.errors import ConfigurationError
from evener.training.engine import Engine
from tests.strategies.seven import plain


def refused(strategy: str) -> str:
    """Where rank 1 has room for 1000 bytes, and the model needs more."""
    short = 1000 if torch.distributed.get_rank() == 1 else 2**20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "memory_nbytes", lambda device, ranks: short)
        try:
            with Engine(plain(), strategy=strategy, device="cpu", steps=1):
                return "no error"
        except ConfigurationError as error:
            return str(error)


def test_what_does_not_fit_is_refused_with_the_name_of_what_would(ranks: Any) -> None:
    for message in ranks(2).run(refused, "auto"):
        assert "of Sequential need" in message
        assert "rank 1 has 9.31e-07 GiB: use strategy 'sharded'" in message
    assert ranks(2).run(refused, "dimension") == ["no error"] * 2, "which divides the model"
