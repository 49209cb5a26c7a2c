"""The command-line parser: short usage, one line of help for each option, and suggestions for misspelt options."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from evener.core.did_you_mean import did_you_mean
from evener.core.elsewhere import is_url, place_of
from evener.errors import ConfigurationError
from evener.files import read_json

WIDTH = 100
_COLUMN = 36
"""Column at which the explanation of an option begins."""


@dataclass(frozen=True)
class CommandHelp:
    """Name and help texts of a command."""

    name: str
    help: str
    """One line, for the list of commands."""
    description: str
    usage: str
    """Usage after the command's name, such as ``TASK [OPTIONS]``."""
    examples: tuple[str, ...]


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts only full option names, and prints its usage with each error."""

    def __init__(self, **known: Any) -> None:
        self.options: list[str] = []
        self.explained: list[tuple[argparse.Action, str]] = []
        """Options with a longer text for ``--help-full``, and the text."""
        self.files: list[argparse.Action] = []
        """Arguments that take the name of a file or a directory."""
        self.inner: list[Parser] = []
        """Parsers of the commands."""
        self._outputs: list[argparse.Action] = []
        """Options that name a file to write."""
        self._kinds: dict[str, Sequence[str]] = {}
        """For an option that replaces a JSON file of its own kind alone: names of which such a file has one."""
        self.rest = ""
        """Attribute that receives the words after ``--``, for a command that passes them on; empty for others."""
        self._titled: dict[str, Any] = {}
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **known)

    def command(self, commands: Any, command_help: CommandHelp) -> Parser:
        """Adds a command without options to ``commands``, the object that ``add_subparsers`` returned."""
        examples = "\n".join(f"  {line}" for line in command_help.examples)
        parser: Parser = commands.add_parser(
            command_help.name,
            help=command_help.help,
            description=textwrap.fill(command_help.description, WIDTH),
            usage=f"%(prog)s {command_help.usage}",
            epilog=f"examples:\n{examples}" if examples else None,
        )
        self.inner.append(parser)
        return parser

    def file(self, name: str, metavar: str, help: str) -> None:
        """Adds an argument that names a run directory or a checkpoint, which may lie elsewhere."""
        self.files.append(self.add_argument(name, type=place, metavar=metavar, help=help))

    def option(
        self, group: str, *names: str, help: str, full: str = "", replaces: Sequence[str] = (), **known: Any
    ) -> None:
        """Adds an option to the group with the title ``group``.

        Args:
            help: One line of help.
            full: The text for ``--help-full``; if empty, ``help``.
            replaces: For the name of a file to write: a file that is there is replaced if it is a JSON object with one
                of these names. If there are none, the command itself looks what it replaces.
        """
        if group not in self._titled:
            self._titled[group] = self.add_argument_group(group)
        action = self._titled[group].add_argument(*names, help=help.replace("%", "%%"), **known)
        self.options += action.option_strings
        self.files += [action] if known.get("type") in (path, place, drawing) else []
        self._outputs += [action] if group == "output" and known.get("type") in (path, drawing) else []
        self._kinds[action.dest] = replaces
        if full:
            self.explained.append((action, full.replace("%", "%%")))

    def hidden(self, name: str, **known: Any) -> None:
        """Adds another spelling of an option, which is hidden in the help."""
        self.add_argument(name, help=argparse.SUPPRESS, **known)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        rest: list[str] = []
        for word in args or ():
            name, has_value, value = word.partition("=")
            if has_value and value == "--" and name in self.options:  # argparse drops such a value
                self.error(f"argument {name}: expected one argument")
        if self.rest and "--" in args:
            args, rest = args[: args.index("--")], args[args.index("--") + 1 :]
        found, strange = super().parse_known_args(args, namespace)
        if self.rest:
            setattr(found, self.rest, rest)
        if strange:
            self.error(self._strange(strange))
        self._check_outputs(found)
        return found, strange

    def _check_outputs(self, found: argparse.Namespace) -> None:
        """Refuses a file that two options would write, since only the second would be left, a file of a run, and one of
        another kind."""
        seen: dict[str, str] = {}
        for action in self._outputs:
            file, option = getattr(found, action.dest), action.option_strings[0]
            if file is None or str(file) == "-" or (file.exists() and not file.is_file()):
                continue
            other = seen.setdefault(os.path.realpath(file), option)
            if other != option:
                self.error(f"{other} and {option} both name {file}: give each a file of its own")
            self._check_replaced(option, file, self._kinds[action.dest])

    def _check_replaced(self, option: str, file: Path, names: Sequence[str]) -> None:
        from evener.checkpoint.outputs import check_output  # not needed to parse most command lines

        try:
            check_output(file)
            there = read_json(file) if names and file.exists() and file.stat().st_size else None
        except ConfigurationError as error:
            self.error(f"{option}: {error}")
        except (OSError, ValueError):
            there = ()
        if there is not None and not (isinstance(there, dict) and any(name in there for name in names)):
            self.error(
                f"{option}: {file} is there already, and was not written by {option}: name another file"
            )

    def _strange(self, strange: Sequence[str]) -> str:
        named = [word.partition("=")[0] for word in strange if word.startswith("-")]
        if not named:
            return f"unrecognized arguments: {' '.join(strange)}"
        near = did_you_mean(named[0], self.options)
        return f"there is no option {named[0]}" + (f"; {near}" if near else "")

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2])) if wrong else ""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}{f'; {near}' if near else ''}\n")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=WIDTH, max_help_position=_COLUMN)


def path(text: str) -> Path:
    """Converts text to a path. An empty text is refused, since it would mean the working directory.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL, and this must be a local file")
    return Path(text)


def drawing(text: str) -> Path:
    """Converts text to the path of a drawing to write.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is empty, or the name of another kind of file.
    """
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text} does not end with .svg, which is what is drawn")
    return path(text)


def place(text: str) -> Path:
    """Converts text to the path of a run directory, a checkpoint or weights, which may lie elsewhere.

    Raises:
        argparse.ArgumentTypeError: If ``text`` is empty, or no URL of a directory.
    """
    try:
        return place_of("run_dir", text) if is_url(text) else path(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class Once(argparse.Action):
    """Stores a value, and refuses a second one, which would replace the first without a word."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        if getattr(namespace, self.dest, None) is not None:
            parser.error(f"{option} is given twice: {getattr(namespace, self.dest)} and {value}; give one")
        setattr(namespace, self.dest, value)


class HelpFull(argparse.Action):
    """Prints the help with the full text of each option, and exits."""

    def __call__(self, parser: Any, *_: Any) -> None:
        for action, full in parser.explained:
            action.help = full
        parser.print_help()
        parser.exit()
