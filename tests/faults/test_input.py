"""Faults of the data: what cannot be read is named, and left out where that was asked for.

The row of a worker shows how a rank's failure reaches the command; the others that one rank alone meets need no second.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.running import Fault, rows, suffer

READING = r"reading sample 53 \(pictures/29.png\) of the training set failed: OSError: cannot identify image"
SKIP = ("--on-bad-sample", "skip")
FAULTS = (
    Fault("item raises", "tests.faults.tasks_input:item", 1, (READING,), 30, never=()),
    Fault(
        "item raises in a worker",
        "tests.faults.tasks_input:item",
        1,
        (r"rank \d: " + READING,),
        30,
        ("--workers", "1"),
        never=(),
    ),
    Fault(
        "corrupt samples skipped",
        "tests.faults.tasks_input:items",
        0,
        (
            r"rank \d skips sample 23 \(pictures/23.png\) of the training set: OSError: cannot identify image 23.png",
            "epoch 4: 2 samples could not be read and were skipped",
        ),
        30,
        (*SKIP, "--workers", "1"),
    ),
    Fault(
        "too many corrupt samples",
        "tests.faults.tasks_input:too_many",
        1,
        (r"of the 48 samples of epoch 1 could not be read, more than 10%; the last on this rank is sample",),
        30,
        SKIP,
    ),
    Fault(
        "memory limit in a worker",
        "tests.faults.tasks_input:hungry",
        1,
        (r"reading sample 7 \(pictures/7.png\) of the training set failed: \w*Error: .*(memory|alloc)",),
        30,
        ("--workers", "1"),
        never=(),
    ),
)
ALONE = ("item raises", "memory limit in a worker")


EACH_KIND = ("item raises", "corrupt samples skipped", "memory limit in a worker")


@pytest.mark.parametrize("fault", rows(*FAULTS, slow=EACH_KIND))
def test_it_ends_as_promised(fault: Fault, tmp_path: Path) -> None:
    ended = suffer(fault, tmp_path, processes=1 if fault.name in ALONE else 2)
    if fault.status == 0:
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["samples"], summary["skipped"]) == (4 * 48, 4 * 2)
        assert "8 samples could not be read and count for nothing" in ended.out
