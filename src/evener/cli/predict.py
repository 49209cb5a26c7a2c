"""``evener predict``: writes the outputs of a run's model for a dataset to a file."""

from __future__ import annotations

import argparse

from evener.cli import options
from evener.cli.evaluate import SETTINGS, add_run_options, applied_of
from evener.cli.parsing import CommandHelp, Parser, path
from evener.errors import ConfigurationError

HELP = CommandHelp(
    "predict",
    "write the outputs of a run's model, on all devices",
    "Write the outputs of a run's model for every sample of a dataset, in its order, computed on all devices. "
    "The file is written atomically. Its name says the format: .npy holds one tensor, .npz tensors by name, "
    ".csv one number or one row of numbers for each sample, .pt whatever the model gives.",
    usage="RUN --data DATA --out FILE [OPTIONS]",
    examples=(
        "evener predict runs/first --data evaluate --out scores.npy",
        "evener predict runs/first --data images.npy --out scores.csv --processes 2",
        "evener predict runs/first --data mytask:test_set --out scores.pt",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    add_run_options(parser)
    parser.option(
        "what",
        "--data",
        metavar="DATA",
        required=True,
        help="train, evaluate, a file, or package.module:dataset",
        full="train or evaluate of the task; a file .npy, .npz or .pt of tensors whose rows are inputs; or "
        "package.module:dataset",
    )
    parser.option(
        "what", "--inputs-alone", action="store_true", help="items are inputs, not pairs (inputs, targets)"
    )
    options.add_task_options(parser, positional=False)
    formats = "the file: .npy, .npz, .csv or .pt"
    parser.option("output", "--out", type=path, metavar="FILE", required=True, help=formats)
    parser.option("output", "--overwrite", action="store_true", help="replace a file that is there")
    options.add_config_options(parser, *(name for name in SETTINGS if name != "on_bad_sample"))
    options.add_rendezvous_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Predicts, writes the file, and prints the shapes of its content."""
    from evener.training.prediction_files import check_out, shapes, write_outputs

    if arguments.inputs_alone and arguments.data in ("train", "evaluate"):
        raise ConfigurationError(
            f"--inputs-alone and --data {arguments.data}: items of a task are pairs (inputs, targets); leave "
            "--inputs-alone out"
        )
    check_out(arguments.out, arguments.overwrite)
    applied = applied_of(arguments)
    from evener.core.text import printable
    from evener.training.inference import predict_run

    targets, met = not arguments.inputs_alone, options.rendezvous_of(arguments)
    outputs = predict_run(applied, arguments.data, targets=targets, rendezvous=met)
    if outputs is not None:
        write_outputs(arguments.out, outputs)
        print(printable(f"{arguments.out}: {shapes(outputs)}"), flush=True)
    return 0
