"""``evener list``: all short names, Evener's own and those that other packages have registered."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from evener.cli.parsing import CommandHelp, Parser
from evener.core.config.strategy_names import MEANINGS

_OPTIONS = {
    "tasks": "TASK",
    "strategies": "--strategy",
    "all-reduces": "--allreduce",
    "balancers": "--balance",
}
KINDS = {"tasks": "task", "strategies": "strategy", "all-reduces": "all-reduce", "balancers": "balancer"}
HELP = CommandHelp(
    "list",
    "list tasks, strategies, all-reduces and balancers",
    "List the short names that there are, Evener's own and those that other packages give by entry points, with what "
    "each stands for.",
    usage="[WHAT]",
    examples=("evener list", "evener list strategies"),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "what", nargs="?", choices=tuple(KINDS), metavar="WHAT", help=f"{', '.join(KINDS)} (default: all)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the names, one a line."""
    shown = [arguments.what] if arguments.what else list(KINDS)
    blocks = ["\n".join([f"{what} ({_OPTIONS[what]})", *_lines(what)]) for what in shown]
    print("\n\n".join(blocks), flush=True)
    return 0


def _lines(what: str) -> Iterator[str]:
    from importlib.metadata import entry_points

    from evener.core.plugins import GROUPS

    own = MEANINGS[KINDS[what]]
    for name, meaning in own.items():
        yield f"  {name:<16} {meaning}"
    for point in sorted(entry_points(group=GROUPS[KINDS[what]]), key=lambda point: point.name):
        package = point.dist.name if point.dist else "another package"
        hidden = ", hidden by Evener's own" if point.name in own else ""
        yield f"  {point.name:<16} {point.value}  ({package}{hidden})"
