"""Faults of a rank as a whole: it is killed, raises, or comes late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.running import Fault, rows, suffer, suffer_warm
from tests.warm import Warm

FAULTS = (
    Fault("killed", "killed", 1, (r"rank 1 \(pid \d+\) was killed by SIGKILL",), 10),
    Fault("exception", "raises", 1, (r"rank 1 raised RuntimeError: no luck",), 10, never=()),
)


@pytest.mark.parametrize("fault", rows(*FAULTS, slow=("killed",)))
def test_it_ends_as_promised(fault: Fault, tmp_path: Path) -> None:
    suffer(fault, tmp_path)


@pytest.mark.slow
def test_a_rank_that_joins_late_is_waited_for(tmp_path: Path, warm: Warm, capsys: Any) -> None:
    """Within the timeout: one that never joins is among the hangs."""
    fault = Fault("joins late", "joins_late", 0, ("evaluation: loss",), 30, never=("Traceback", "evener: "))
    suffer_warm(fault, tmp_path, warm, capsys)
