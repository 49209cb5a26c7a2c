"""The bits of a training do not depend on its division: all parts of ``exact="bits"`` together, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.cli.main import main
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError
from evener.tools.verify import bits
from evener.tools.verify.bits import BitsTrace, TracedDivision, trace_bits, verify_bits
from tests.bits_tasks import CUT
from tests.tiers import SLOW
from tests.warm import Warm

KINDS = {
    "mlp": {},
    "convolution": {"clip_norm": 0.5},
    "batch_norm": {"batch_norm": "grain", "clip_norm": 0.5},
    "transformer": {},
    "lstm": {"clip_norm": 0.5},
}
THREE = {
    "drawn": {"balance": bits.DRAWN},
    "small": {"balance": bits.DRAWN, "bucket_mb": 0.001, "allreduce": "ring"},
    "tree": {"balance": "1,0,2", "allreduce": "tree"},
}
"""Divisions by three ranks. Each network meets one of them, and each of them meets two networks."""


def settings_of(task: str, **more: Any) -> RunConfig:
    return RunConfig(device="cpu", exact="bits", steps=5, check_replicas=0, **CUT, **KINDS[task], **more)


def traced(
    task: str, divisions: list[TracedDivision], environment: Environment | None = None
) -> list[BitsTrace]:
    return trace_bits(f"tests.bits_tasks:{task}", None, divisions, environment)


def assert_alike(reference: BitsTrace, others: list[BitsTrace]) -> None:
    found = bits.first_difference(reference, others)
    assert found is None, f"{others[found[0] - 1].words}: {found}"


def has_lstm_in_bf16() -> bool:
    """Whether PyTorch itself computes one. Its library for CPUs needs AVX-512 for that."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.ones(3, 1, 2))
    except RuntimeError as error:
        if "primitive" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("task", "precision", "three"),
    [
        *((task, None, three) for task, three in zip(KINDS, [*THREE, *THREE], strict=False)),
        ("transformer", "bf16", "tree"),
        *(pytest.param(task, "bf16", "small", marks=SLOW) for task in KINDS if task != "transformer"),
    ],
)
def test_networks_have_the_same_bits_on_one_to_three_ranks(
    ranks: Any, task: str, precision: str | None, three: str
) -> None:
    if (task, precision) == ("lstm", "bf16") and not has_lstm_in_bf16():
        pytest.skip("PyTorch has no LSTM in bfloat16 for this processor")
    config = settings_of(task, precision=precision)
    (reference,) = traced(task, [TracedDivision("1", config.replace(strategy="single"))], Environment())
    of_three = TracedDivision(f"3, {three}", config.replace(**THREE[three]))
    assert_alike(reference, ranks(2).run(traced, task, [TracedDivision("2", config)])[0])
    assert_alike(reference, ranks(3).run(traced, task, [of_three])[0])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_so_have_divided_states(ranks: Any, zero: int) -> None:
    config = settings_of("mlp", clip_norm=0.5)
    (reference,) = traced("mlp", [TracedDivision("1", config.replace(strategy="single"))], Environment())
    sharded = config.replace(strategy="sharded", strategy_option=(f"zero={zero}",), balance=bits.DRAWN)
    assert_alike(reference, ranks(3).run(traced, "mlp", [TracedDivision(f"zero {zero}", sharded)])[0])


@pytest.mark.slow
@pytest.mark.parametrize("task", KINDS)
def test_five_and_eight_ranks_have_the_same_bits(ranks: Any, task: str) -> None:
    config = settings_of(task)
    (reference,) = traced(task, [TracedDivision("1", config.replace(strategy="single"))], Environment())
    for number in (5, 8):
        divisions = [
            TracedDivision(f"{number}, {name}", config.replace(balance=bits.DRAWN, allreduce=name))
            for name in bits.ALL_REDUCES["cpu"]
        ]
        assert_alike(reference, ranks(number).run(traced, task, divisions)[0])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    ranks: Any, tmp_path: Path, before: int, after: int
) -> None:
    config = settings_of("transformer", clip_norm=0.5)
    (reference,) = traced(
        "transformer", [TracedDivision("1", config.replace(strategy="single"))], Environment()
    )
    saved, drawn = tmp_path / "saved", config.replace(balance=bits.DRAWN)

    def run(number: int, division: TracedDivision) -> list[BitsTrace]:
        if number == 1:
            alone = division.config.replace(strategy="single", balance=None)
            return traced("transformer", [dataclasses.replace(division, config=alone)], Environment())
        return ranks(number).run(traced, "transformer", [division])[0]

    assert_alike(reference, run(before, TracedDivision("before", drawn, saves=saved)))
    assert_alike(reference, run(after, TracedDivision("after", drawn, resumes=saved)))


# What is found


def test_another_bit_is_found(ranks: Any) -> None:
    """One bit of one weight, changed on rank 1 alone before the third step."""

    def changed(task: str, divisions: list[TracedDivision]) -> list[BitsTrace]:
        step, calls = torch.optim.SGD.step, 0

        def stepped(optimizer: Any, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                optimizer.param_groups[0]["params"][0].data.view(torch.int32).view(-1)[5] ^= 1
            return step(optimizer, *args)

        torch.optim.SGD.step = stepped  # type: ignore[method-assign]
        try:
            return traced(task, divisions)
        finally:
            torch.optim.SGD.step = step  # type: ignore[method-assign]

    config = settings_of("convolution")
    (reference,) = traced(
        "convolution", [TracedDivision("1", config.replace(strategy="single"))], Environment()
    )
    found = ranks(2).run(changed, "convolution", [TracedDivision("2", config)])[0]
    assert bits.first_difference(reference, found) == (1, 2, "0.weight")


def test_verdict_and_command(warm: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = ["--grain", "32", "--batch-size", "200", "--steps", "4"]
    status = warm.status(
        "evener",
        "verify",
        "digits",
        "--bits",
        "--processes",
        "2",
        *cut,
        "--device",
        "cpu",
        "--json",
        "out.json",
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    told = json.loads((tmp_path / "out.json").read_text())
    assert printed.startswith(f"PASS: the same bits in {len(told['divisions'])} divisions, sha256 ")
    assert len(set(told["divisions"].values())) == len(set(told["optimizers"].values())) == 1
    for word in (
        "ring",
        "tree",
        "native",
        "shared-memory",
        "1 rank, then 2",
        "2 ranks, then 1",
        "grains of 32",
    ):
        assert word in printed


def test_a_task_whose_bits_depend_on_the_division_fails(
    warm: Warm, capsys: pytest.CaptureFixture[str]
) -> None:
    status = warm.status(
        *("evener", "verify", "tests.bits_tasks:depends", "--bits", "--processes", "2", "--steps", "3"),
        *("--device", "cpu"),
    )
    printed = capsys.readouterr().out
    assert status == 1
    assert printed.startswith("FAIL: not the same bits. 2 ranks, equal shares: ")
    assert "after step 0 is not that of 1 rank: " in printed
    assert " numbers differ" in printed


def test_what_cannot_be_verified_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="nothing to verify with 1 process"):
        verify_bits("digits", processes=1, device="cpu")
    with pytest.raises(ConfigurationError, match="leave resume out"):
        verify_bits("digits", processes=2, device="cpu", resume="somewhere")
    assert main(["verify", "loop.py", "--bits"]) == 2
    assert "--bits compares the bits of a TASK" in capfd.readouterr().err
