"""``evener completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import argparse

from evener.cli.parsing import Parser, Words

SHELLS = ("bash", "zsh", "fish")
WORDS = Words(
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

    print(shtab.complete(arguments.parser(), arguments.shell), flush=True)
    return 0
