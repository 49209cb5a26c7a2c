"""Borrows private names of PyTorch as Evener does, for tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@contextmanager
def borrowed(file: str, package: str = "torch_internals") -> Iterator[Any]:
    """The module; whatever fails in the block is told as the loss of its names."""
    path = f"src/evener/{package.replace('.', '/')}/{file}.py"
    try:
        yield importlib.import_module(f"evener.{package}.{file}")
    except Exception as error:
        pytest.fail(
            f"torch {torch.__version__} no longer has what {path} borrows, or it means something else: "
            f"{type(error).__name__}: {error}; see there for what it is used for"
        )
