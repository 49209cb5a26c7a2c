"""Creates command-line options from the fields of ``RunConfig``, so that each setting is described only once."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.cli.parsing import HelpFull, Once, Parser, path, place
from evener.core.config import help_text as settings_help
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import PLACES
from evener.errors import ConfigurationError

if TYPE_CHECKING:
    from evener.distributed.launch.rendezvous import Rendezvous

RENDEZVOUS = {
    "nnodes": ("number of machines, or MIN:MAX", str),
    "node_rank": ("number of this machine, for a static rendezvous", int),
    "rdzv_backend": ("rendezvous backend, such as c10d or static", str),
    "rdzv_endpoint": ("HOST[:PORT] where the machines meet", str),
    "rdzv_id": ("name of the job, the same on all machines", str),
    "rdzv_conf": ("further rendezvous settings KEY=VALUE,...", str),
    "master_addr": ("address of machine 0, for a static rendezvous", str),
    "master_port": ("port of machine 0, for a static rendezvous", int),
    "max_restarts": (
        "restart up to N times after a failure (default: 0, or MAX - MIN)",
        int,
    ),
}
"""torchrun's options, under the same names."""


def add_config_options(parser: Parser, *names: str) -> None:
    """Adds options for the named fields of ``RunConfig`` (default: all), and ``--config`` and ``--print-config``."""
    fields = {entry.name: entry for entry in dataclasses.fields(RunConfig)}
    unknown = set(names) - fields.keys()
    assert not unknown, unknown
    grouped = [name for lines in settings_help.GROUPS.values() for name in lines if name in fields]
    for name in dict.fromkeys([*grouped, *fields]):
        if not names or name in names:
            _add(parser, fields[name], KINDS[name])
    group = "settings from elsewhere (the command line wins over EVENER_* variables, these over the file)"
    parser.option(
        group,
        "--config",
        action=Once,
        type=path,
        metavar="FILE",
        help="settings as TOML, by their names in Python",
    )
    parser.option(
        group,
        "--print-config",
        action="store_true",
        help="print all settings as such a file, and do nothing else",
    )
    parser.add_argument(
        "--help-full",
        nargs=0,
        action=HelpFull,
        help="this help, with all details of each option",
    )


def _add(parser: Parser, entry: dataclasses.Field[Any], kind: type) -> None:
    option, more = f"--{entry.name.replace('_', '-')}", entry.metadata
    default = "" if entry.default in (None, ()) or entry.default is False else f" (default: {entry.default})"
    texts = {"help": settings_help.brief(entry.name, more["help"]) + default, "full": more["help"] + default}
    group = settings_help.group_of(entry.name)
    if kind is bool:
        parser.option(group, option, action="store_true", default=None, **texts)
        parser.hidden(f"--no-{option[2:]}", dest=entry.name, action="store_false", default=None)
        return
    without = more["without_value"]
    optional: dict[str, Any] = {"nargs": "?", "const": without} if without else {}
    parser.option(
        group,
        option,
        dest=entry.name,
        **optional,
        action="append" if kind is tuple else "store",
        type=str if kind is tuple else place if entry.name in PLACES else path if kind is Path else kind,
        default=None,
        metavar=more["metavar"] or "NAME",
        choices=more["choices"] or None,
        **texts,
    )


def _scalar(kind: Any) -> type:
    """Returns the type ``T`` of ``T | None``; ``tuple`` for a setting that may be given several times."""
    if typing.get_origin(kind) is tuple:
        return tuple
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    scalar: type = next(part for part in parts if part is not type(None))
    return scalar


KINDS = {name: _scalar(kind) for name, kind in typing.get_type_hints(RunConfig).items()}
"""Type of each setting. ``tuple``: the option may be repeated, and the setting is a tuple of strings."""
FURTHER = {"task": str, "data_dir": Path, "report": bool} | {
    name: kind for name, (_, kind) in RENDEZVOUS.items()
}
"""Further names that a settings file or an environment variable may set, and their types."""


def add_task_options(parser: Parser, *, positional: bool = True) -> None:
    """Adds the options for the task and the arguments of its function."""
    names = "digits, mnist, shakespeare, or package.module:function"
    if positional:
        parser.add_argument("task", metavar="TASK", nargs="?", help=names)
        parser.set_defaults(needs_task=True)
    else:
        parser.option(
            "task",
            "--task",
            metavar="TASK",
            help="its name: needed unless it comes with Evener",
            full=f"{names}. A run says which task it is of, but one that does not come with Evener is built only where "
            "you name it, or with --trust",
        )
        parser.option(
            "task",
            "--trust",
            action="store_true",
            help="run the task that RUN names, whatever it is",
            full="build the task that the run names, whatever function that is: for directories of your own",
        )
    parser.option(
        "task",
        "--data-dir",
        type=path,
        metavar="DIR",
        help="where the task finds its data (a file, for shakespeare)",
    )
    parser.option(
        "task",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument for the task's function; may be repeated",
    )


def add_shares_option(parser: Parser) -> None:
    """Adds the option for fixed shares, as fractions or weights."""
    parser.option(
        "shares of a batch",
        "--shares",
        dest="balance",
        metavar="W0,W1,...",
        help="divide every batch in these parts; same as --balance",
    )


def add_json_option(parser: Parser, what: str, *names: str) -> None:
    """Adds the option that also writes the command's output to a JSON file, which has one of ``names``."""
    text = f"also write {what} to this file"
    parser.option("output", "--json", type=path, metavar="PATH", help=text, replaces=names)


def add_report_option(parser: Parser, help: str) -> None:
    """Adds the option that writes the report at the end of a run."""
    full = f"{help}, also if it has failed or was stopped; see evener report"
    parser.option("output", "--report", action="store_true", default=None, help=help, full=full)
    parser.hidden("--no-report", dest="report", action="store_false", default=None)


def add_rendezvous_options(parser: Parser) -> None:
    """Adds the rendezvous options for several machines."""
    for name, (text, kind) in RENDEZVOUS.items():
        option = f"--{name.replace('_', '-')}"
        metavar = "N" if kind is int else name.rpartition("_")[2].upper()
        group = "several machines (torchrun's options)"
        parser.option(group, option, dest=name, type=kind, metavar=metavar, help=text)
        if "_" in name:
            parser.hidden(f"--{name}", dest=name, type=kind)


def config_of(arguments: argparse.Namespace, below: Mapping[str, Any] | None = None) -> RunConfig:
    """Creates the run's configuration from the parsed arguments.

    Args:
        below: Settings to use where the arguments have none.

    Raises:
        ConfigurationError: If a value is invalid. The message names its source if that is not the command line.
    """
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in KINDS and value is not None
    }
    try:
        return RunConfig(**{**(below or {}), **given})
    except ConfigurationError as error:
        raise type(error)(_with_sources(str(error), getattr(arguments, "sources", {}))) from error


def _with_sources(message: str, sources: Mapping[str, str]) -> str:
    """Prepends the sources of the settings that the message mentions."""
    named = [sources[name] for name in sources if re.search(rf"\b{name}\b", message)]
    return ": ".join((*dict.fromkeys(named), message))


def said(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns, by option, the values given on the command line itself. An option that was not given there is None, even
    if a file or an environment variable sets it.
    """
    elsewhere = getattr(arguments, "sources", {})
    return {
        f"--{name.replace('_', '-')}": None if name in elsewhere else getattr(arguments, name)
        for name in names
    }


def find_modules_here() -> None:
    """Makes modules in the working directory importable, as ``python -m`` does: user-defined tasks are often there."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def task_options_of(arguments: argparse.Namespace, *, data_dir: bool = True) -> dict[str, Any]:
    """Returns the keyword arguments for the task's function.

    Args:
        data_dir: Whether to include ``--data-dir``.

    Raises:
        ConfigurationError: If an ``--option`` does not have the form ``KEY=VALUE``.
    """
    options: dict[str, Any] = dict(getattr(arguments, "options_below", {}))
    for text in arguments.option:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigurationError(f"--option {text!r} is not KEY=VALUE")
        options[key] = _literal(value)
    if data_dir and arguments.data_dir is not None:
        options["data_dir"] = arguments.data_dir
    return options


def rendezvous_of(arguments: argparse.Namespace) -> Rendezvous | None:
    """Returns the given rendezvous options. Returns None for a single machine, if no such option was given.

    Raises:
        ConfigurationError: If the options contradict each other.
    """
    from evener.distributed.launch.rendezvous import Rendezvous

    given = {name: value for name in RENDEZVOUS if (value := getattr(arguments, name)) is not None}
    return Rendezvous(**given) if given else None


def _literal(text: str) -> Any:
    import ast

    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
