"""Faults of numbers: what is not finite, replicas that come apart, and ranks that are about to train other things.

All ranks tell of each in the same words. How these reach the command is the same, too: one
row is a whole command, and the others run on ranks that are up already.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.running import Fault, rows, suffer, suffer_warm
from tests.warm import Warm

GRADIENT = r"a gradient is not finite in step \d on rank [01]: that of inner\.bias; the run stops here"
NOT_THE_SAME = "the ranks do not train the same"

FAULTS = (
    Fault("NaN gradient", "bad_sample", 1, (GRADIENT,), 20),
    Fault(
        "NaN loss in the last step", "bad_loss_at_the_end", 1, (r"the loss is nan in step 0 on rank 0",), 20
    ),
    Fault("overflow at the end of an epoch", "overflows", 1, (r"in step 7 on rank 0",), 20),
    Fault(
        "weight edited on a rank",
        "edited",
        1,
        (
            r"after step 4 ranks that must hold the same do not: 0\.weight is one thing on rank 0, another on rank 1",
        ),
        20,
        ("--check-replicas", "1"),
    ),
    Fault(
        "one parameter more",
        "one_parameter_more",
        2,
        (NOT_THE_SAME, r"more: float32 of \(2,\) on rank 1"),
        20,
    ),
    Fault(
        "another order",
        "another_order",
        2,
        (NOT_THE_SAME, r"weight: float32 of \(3, 6\) on rank 0, bias"),
        20,
    ),
    Fault("other rows", "other_rows", 2, (r"training set is 48 on rank 0, 46 on rank 1",), 20),
    Fault(
        "another learning rate", "other_rate", 2, (r"lr in the optimizer's group 0 is 0\.1 on rank 0",), 20
    ),
)


WHOLE = "NaN gradient"


@pytest.mark.parametrize("fault", rows(*FAULTS))
def test_it_ends_as_promised(
    fault: Fault, tmp_path: Path, request: pytest.FixtureRequest, capsys: Any
) -> None:
    if fault.name == WHOLE:
        suffer(fault, tmp_path)
    else:
        suffer_warm(fault, tmp_path, request.getfixturevalue("warm"), capsys)
    assert not list((tmp_path / "run").glob("checkpoints/step-8")), (
        "nothing of a step that went wrong is saved"
    )


GOING_ON = (
    Fault("left out", "bad_sample", 0, (r"its update is left out",), 30, ("--non-finite", "skip")),
    Fault(
        "healed",
        "edited",
        0,
        (r"and were healed: 0\.weight",),
        30,
        ("--check-replicas", "1", "--on-replica-mismatch", "rank0"),
    ),
    Fault(
        "restored",
        "passing",
        0,
        (r"the loss is nan in step 6 on rank 1: back to the checkpoint after 4 steps",),
        30,
        ("--non-finite", "restore"),
    ),
)


@pytest.mark.parametrize("fault", rows(*GOING_ON))
def test_it_goes_on_as_promised(fault: Fault, tmp_path: Path, warm: Warm, capsys: Any) -> None:
    suffer_warm(fault, tmp_path, warm, capsys)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["skipped_steps"] == (2 if fault.name == "left out" else 0)
    assert summary["steps"] == (10 if fault.task == "bad_sample" else 16)
    assert summary["final_loss"] > 0
