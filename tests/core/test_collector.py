"""The pause of Python's garbage collector during imports."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from evener.core.collector import collector_paused


@pytest.mark.parametrize("was", [True, False])
def test_the_collector_is_afterwards_as_it_was(was: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was else gc.disable)()
    try:
        with suppress(ImportError), collector_paused():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was
    finally:
        (gc.enable if before else gc.disable)()
