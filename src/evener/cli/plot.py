"""``evener plot``: plots a run's shares, times and speed."""

from __future__ import annotations

import argparse

from evener.cli.parsing import CommandHelp, Parser, drawing, place
from evener.errors import ConfigurationError

HELP = CommandHelp(
    "plot",
    "draw a run's shares, times and speed",
    "Draw the share that each rank had of the batches, the time of its own work, and the steps per second, "
    "from a run's records, as SVG. Further runs are compared with the first by their steps per second.",
    usage="RUN [RUN ...] --out FILE [OPTIONS]",
    examples=(
        "evener plot runs/first --out first.svg",
        "evener plot runs/auto runs/equal --out compared.svg",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.files.append(
        parser.add_argument("runs", type=place, metavar="RUN", nargs="+", help="a run directory")
    )
    parser.option("output", "--out", type=drawing, metavar="FILE", required=True, help="the file, .svg")
    parser.option("output", "--overwrite", action="store_true", help="replace a file that is there")


def execute(arguments: argparse.Namespace) -> int:
    """Writes the plot and prints its title."""
    from evener.core.os_errors import storage_errors
    from evener.core.text import printable
    from evener.files import replace_text
    from evener.tools.report.gather import report_of
    from evener.tools.report.plot import drawn, title

    out = arguments.out
    if out.exists() and not arguments.overwrite:
        raise ConfigurationError(f"{out} is there already: name another file with --out, or give --overwrite")
    runs = [report_of(run) for run in arguments.runs]
    text = drawn(runs)
    with storage_errors(f"the drawing cannot be written to {out}"):
        replace_text(out, text, follow=True)
    print(printable(f"{out}: {title(runs)}"), flush=True)
    return 0
