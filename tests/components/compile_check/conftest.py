from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.components.compile_check import wrong_code


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    wrong_code.register()
    torch.compiler.reset()
    yield
    torch.compiler.reset()
