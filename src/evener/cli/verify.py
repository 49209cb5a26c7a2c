"""``evener verify``: proves that a division of the work trains the same weights as one device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.cli import options

if TYPE_CHECKING:
    from evener.verification import Verification

SETTINGS: tuple[str, ...] = (
    "processes",
    "balance",
    "caps",
    "quantum",
    "throttle",
    "strategy",
    "steps",
    "batch_size",
    "micro_batch",
    "dtype",
    "seed",
    "clip_norm",
)
SETTINGS += ("device", "workers", "timeout_seconds")
SHOWN_STEPS = 20


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="prove that dividing the work changes nothing",
        description="Train the same steps on one device and divided, and compare losses and weights. "
        "Exit status 1 if they differ by more than rounding explains.",
    )
    options.add_task_options(parser)
    options.add_config_options(parser, *SETTINGS)
    options.add_shares_option(parser)
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative weight error that passes (default: by type)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the result to this file")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Compares and prints; 1 if the weights differ."""
    config = options.config_of(arguments)
    options.find_modules_here()
    import dataclasses

    from evener.records import write_json
    from evener.verification import verify

    result = verify(
        arguments.task, config, options=options.task_options_of(arguments), tolerance=arguments.tolerance
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
        f"(allowed {result.tolerance:.0e}); replicas {'bit-identical' if result.replicas_identical else 'DIFFER'}",
        "same training" if result.passed else f"NOT the same training: {result.hint}",
    ]
    return "\n".join(lines)
