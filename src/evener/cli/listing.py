"""``evener list``: the short names that there are, Evener's own and those of other packages."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from evener.cli.parsing import Parser, Words
from evener.short_names import STRATEGIES

_OPTIONS = {
    "tasks": "TASK",
    "strategies": "--strategy",
    "all-reduces": "--allreduce",
    "balancers": "--balance",
}
KINDS = {"tasks": "task", "strategies": "strategy", "all-reduces": "all-reduce", "balancers": "balancer"}
WORDS = Words(
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
    """Prints one name a line."""
    shown = [arguments.what] if arguments.what else list(KINDS)
    blocks = ["\n".join([f"{what} ({_OPTIONS[what]})", *_lines(what)]) for what in shown]
    print("\n\n".join(blocks), flush=True)
    return 0


def _lines(what: str) -> Iterator[str]:
    from importlib.metadata import entry_points

    from evener.plugins import GROUPS

    own = _own(what)
    for name, stands_for in own.items():
        yield f"  {name:<16} {stands_for}"
    for point in sorted(entry_points(group=GROUPS[KINDS[what]]), key=lambda point: point.name):
        package = point.dist.name if point.dist else "another package"
        hidden = ", hidden by Evener's own" if point.name in own else ""
        yield f"  {point.name:<16} {point.value}  ({package}{hidden})"


def _own(what: str) -> dict[str, str]:
    """Evener's, by name. Those of a registry say what they are in the words of their documentation."""
    if what == "tasks":
        from evener.tasks import BUILT_IN

        return dict(BUILT_IN)
    if what == "strategies":
        return {"auto": "ddp, or single for one rank", **STRATEGIES}
    return dict(_ALL_REDUCES if what == "all-reduces" else _BALANCERS)


_ALL_REDUCES = {
    "native": "the backend's own: gloo, NCCL",
    "ring": "messages around a ring, the most bytes a second",
    "tree": "up and down a tree, for many ranks",
    "halving": "halving and doubling, few messages",
    "direct": "everything to everyone, for few ranks and small sums",
    "ring-tree": "rings inside of hosts, trees between them",
    "shared-memory": "common memory of one host, the default of CPU ranks",
    "two-level": "common memory inside of hosts, a ring between them",
    "auto": "the fastest, as measured",
}
_BALANCERS = {
    "equal": "equal parts",
    "auto": "parts by the learned speed of each rank",
}
