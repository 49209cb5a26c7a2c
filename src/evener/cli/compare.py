"""``evener compare``: says what changed between two runs, and how much faster or slower the second one is."""

from __future__ import annotations

import argparse
import re
import sys

from evener.cli.parsing import CommandHelp, Parser, path, place

HELP = CommandHelp(
    "compare",
    "say what changed between two runs, and by how much",
    "Say what differs between two runs of one task: settings, versions, devices, shares, the time of a step with a "
    "95 % interval, losses and metrics. Exit status 1 if the new run is slower than --fail-slower allows.",
    usage="OLD NEW [OPTIONS]",
    examples=(
        "evener compare runs/before runs/after",
        "evener compare baseline.json runs/after --fail-slower 5%",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    for name in ("old", "new"):
        parser.files.append(
            parser.add_argument(
                name,
                type=place,
                metavar=name.upper(),
                help="a run directory, or a file of `evener report --json`",
            )
        )
    parser.option(
        "output",
        "--fail-slower",
        type=percentage,
        metavar="PERCENT",
        help="status 1 if a step takes so much longer, and that is no chance",
    )
    parser.option(
        "output",
        "--json",
        type=path,
        metavar="FILE",
        help="write the comparison; - for standard output",
        replaces=("step_seconds",),
    )


def percentage(text: str) -> float:
    """Converts ``5%`` or ``5`` to 0.05.

    Raises:
        argparse.ArgumentTypeError: If it is no percentage.
    """
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d*)?)\s*%?\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage, such as 5%")
    return float(found[1]) / 100


def execute(arguments: argparse.Namespace) -> int:
    """Prints the comparison. Returns exit status 1 if the new run is slower than allowed."""
    from evener.cli.report import gathered
    from evener.core.text import printable
    from evener.errors import ConfigurationError
    from evener.files import dumps, write_json
    from evener.tools.report.compare import compare

    runs = gathered([arguments.old, arguments.new]).runs
    if len(runs) != 2:
        raise ConfigurationError(f"there are {len(runs)} runs, as a file has several: compare two")
    found = compare(*runs)
    if arguments.json is not None and str(arguments.json) == "-":
        sys.stdout.write(dumps(found.as_json()) + "\n")
    else:
        print(printable(found.words()))
        if arguments.json is not None:
            write_json(arguments.json, found.as_json(), follow=True)
    sys.stdout.flush()
    return int(arguments.fail_slower is not None and found.slower(arguments.fail_slower))
