"""``evener completion``: completion scripts for shells."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from evener.cli.parsing import CommandHelp, Parser

SHELLS = ("bash", "zsh", "fish")
HELP = CommandHelp(
    "completion",
    "print what a shell needs to complete commands and options",
    "Print a script for bash, zsh or fish by which it completes Evener's commands and options.",
    usage="SHELL",
    examples=(
        'eval "$(evener completion bash)"                              # in ~/.bashrc',
        'evener completion zsh > "${fpath[1]}/_evener"                 # before compinit',
        "evener completion fish > ~/.config/fish/completions/evener.fish",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def execute(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    import shtab

    whole: Parser = arguments.parser()
    for action in _files(whole):
        action.complete = shtab.FILE  # type: ignore[attr-defined] # shtab reads this attribute
    print(shtab.complete(whole, arguments.shell), flush=True)
    return 0


def _files(parser: Parser) -> Iterator[argparse.Action]:
    yield from parser.files
    for inner in parser.inner:
        yield from _files(inner)
