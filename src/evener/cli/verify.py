"""``evener verify``: proves that a division of the work trains the same weights as one device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from evener.cli import options
from evener.cli.parsing import Parser, Words

if TYPE_CHECKING:
    from evener.verification import Verification

SETTINGS = (
    "processes",
    "balance",
    "caps",
    "quantum",
    "throttle",
    "strategy",
    "strategy_option",
    "mesh",
    "devices",
    "steps",
    "batch_size",
    "micro_batch",
    "dtype",
    "precision",
    "precision_of",
    "compile",
    "compile_mode",
    "compile_backend",
    "recompute",
    "offload",
    "offload_to",
    "optimizer_state",
    "batch_norm",
    "fused_optimizer",
    "update_in_backward",
    "seed",
    "clip_norm",
    "allreduce",
    "compress",
    "bucket_mb",
    "device",
    "workers",
    "timeout_seconds",
)
SHOWN_STEPS = 20


WORDS = Words(
    "verify",
    "prove that dividing the work changes nothing",
    "Train the same steps on one device and divided, and compare losses, gradients and weights. "
    "How far rounding alone drives two runs apart is measured, on one device. Exit status 1 if they differ by "
    "more.",
    usage="TASK [OPTIONS]",
    examples=(
        "evener verify digits --processes 3",
        "evener verify mytask:task --shares 3,1 --steps 20 --json verified.json",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_task_options(parser)
    options.add_config_options(parser, *SETTINGS)
    options.add_shares_option(parser)
    parser.option(
        "output",
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative weight error (default: that of rounding)",
    )
    options.add_json_option(parser, "the result")


def execute(arguments: argparse.Namespace) -> int:
    """Compares and prints; 1 if the weights differ."""
    config = options.config_of(arguments)
    options.find_modules_here()
    import dataclasses

    from evener.records import write_json
    from evener.verification import verify

    result = verify(
        arguments.task,
        config,
        options=options.task_options_of(arguments),
        tolerance=arguments.tolerance,
    )
    if arguments.json is not None:
        write_json(arguments.json, dataclasses.asdict(result))
    print(text(result), flush=True)
    return 0 if result.passed else 1


def text(result: Verification) -> str:
    """The result for people."""
    lines = ["step   one device          divided             difference"]
    pairs = list(enumerate(zip(result.reference_losses, result.losses, strict=False)))
    every = max(1, len(pairs) // SHOWN_STEPS)
    lines += [f"{n:>4}   {a:<18.12g}  {b:<18.12g}  {abs(a - b):.1e}" for n, (a, b) in pairs if n % every == 0]
    lines += [
        f"{result.task}: {result.steps} steps of {result.batch_size} samples in {result.dtype}, "
        f"{result.processes} processes, shares {result.shares}, strategy {result.strategy}",
        f"largest relative weight error {result.max_relative_weight_error:.2e} in {result.worst_parameter} "
        f"({_allowed(result)}); replicas {'bit-identical' if result.replicas_identical else 'DIFFER'}",
        *_absolutely(result.judged_absolutely),
        _verdict(result),
    ]
    return "\n".join(lines)


def _allowed(result: Verification) -> str:
    if result.tolerance is not None:
        return f"allowed {result.tolerance:.0e}"
    return f"by rounding alone {result.floor:.2e}"


def _absolutely(names: list[str]) -> list[str]:
    if not names:
        return []
    from evener.verification.hints import listed

    return [f"no gradient but rounding, so judged absolutely: {listed(names)}"]


def _verdict(result: Verification) -> str:
    times = f"{result.times_floor:.3g} times the floor"
    if not result.passed:
        return f"NOT the same training ({times} in {result.worst}): {result.hint}"
    if result.tolerance is not None:
        return f"the same training to the tolerance: {times} (the most in {result.worst})"
    return f"the same training to rounding: {times} (allowed {result.limit:g}; the most in {result.worst})"
