"""How tests run prepared loops, whose settings the loops do not say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from evener.prepared import preparing


@contextmanager
def with_settings(**settings: Any) -> Iterator[None]:
    """Each ``prepare`` inside gets these settings too; at the end the preparation is over."""
    made = preparing.config_of
    usual = {"device": "cpu", "timeout_seconds": 30.0} | settings
    try:
        with patch.object(preparing, "config_of", lambda given: made(usual | given)):
            yield
    finally:
        preparing.end()
