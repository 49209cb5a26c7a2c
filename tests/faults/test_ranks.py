"""Faults of a rank as a whole: it is killed, raises, or leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.running import Fault, rows, suffer

FAULTS = (
    Fault("killed", "killed", 1, (r"rank 1 \(pid \d+\) was killed by SIGKILL",), 10),
    Fault("exception", "raises", 1, (r"rank 1 raised RuntimeError: no luck",), 10, never=()),
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", rows(*FAULTS))
def test_it_ends_as_promised(fault: Fault, tmp_path: Path) -> None:
    suffer(fault, tmp_path)
