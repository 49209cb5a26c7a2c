"""Command-line options made from the fields of ``RunConfig``, so that no setting is described twice."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import sys
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.config import RunConfig
from evener.errors import ConfigurationError

if TYPE_CHECKING:
    from evener.runtime.rendezvous import Rendezvous

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
        "restarts after a rank has failed (default: 0, or with --processes MIN:MAX one for each that can be spared)",
        int,
    ),
}
"""torchrun's options, under the same names."""


def add_config_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds an option for each field of ``RunConfig`` that is named, or for all."""
    kinds = typing.get_type_hints(RunConfig)
    for entry in dataclasses.fields(RunConfig):
        if not names or entry.name in names:
            _add(parser, entry, _scalar(kinds[entry.name]))


def _add(parser: argparse.ArgumentParser, entry: dataclasses.Field[Any], kind: type) -> None:
    if kind is bool:
        option = f"--{entry.name.replace('_', '-')}"
        parser.add_argument(
            option, action="store_true", default=None, help=entry.metadata["help"].replace("%", "%%")
        )
        return
    without = entry.metadata["without_value"]
    optional: dict[str, Any] = {"nargs": "?", "const": without} if without else {}
    parser.add_argument(
        f"--{entry.name.replace('_', '-')}",
        dest=entry.name,
        **optional,
        action="append" if kind is tuple else "store",
        type=str if kind is tuple else path if kind is Path else kind,
        default=None,
        metavar=entry.metadata["metavar"],
        choices=entry.metadata["choices"] or None,
        help=entry.metadata["help"].replace("%", "%%")
        + ("" if entry.default in (None, ()) else f" (default: {entry.default})"),
    )


def path(text: str) -> Path:
    """The path that is named; an empty name would be the working directory.

    Raises:
        argparse.ArgumentTypeError: If it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def _scalar(kind: Any) -> type:
    """The type behind ``T | None``; ``tuple`` for what may be given several times."""
    if typing.get_origin(kind) is tuple:
        return tuple
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    scalar: type = next(part for part in parts if part is not type(None))
    return scalar


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """The task and what its function takes."""
    parser.add_argument("task", metavar="TASK", help="digits, mnist, shakespeare, or package.module:function")
    parser.add_argument(
        "--data-dir", type=path, metavar="DIR", help="where the task finds its data (a file, for shakespeare)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument for the task's function; may be repeated",
    )


def add_shares_option(parser: argparse.ArgumentParser) -> None:
    """Fixed shares, as fractions or weights."""
    parser.add_argument(
        "--shares",
        dest="balance",
        metavar="W0,W1,...",
        help="divide every batch in these parts; same as --balance",
    )


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    """How several machines meet."""
    group = parser.add_argument_group("several machines (torchrun's options)")
    for name, (text, kind) in RENDEZVOUS.items():
        spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        group.add_argument(*spellings, dest=name, type=kind, help=text)


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """The settings that were given.

    Raises:
        ConfigurationError: For values that cannot work.
    """
    names = {entry.name for entry in dataclasses.fields(RunConfig)}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in names and value is not None
    }
    return RunConfig(**given)


def find_modules_here() -> None:
    """Makes modules of the working directory importable, as ``python -m`` does: a task of the user's own is there."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def task_options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for the task's function.

    Raises:
        ConfigurationError: For an option that is not ``KEY=VALUE``.
    """
    options: dict[str, Any] = {}
    for text in arguments.option:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigurationError(f"--option {text!r} is not KEY=VALUE")
        options[key] = _literal(value)
    if arguments.data_dir is not None:
        options["data_dir"] = arguments.data_dir
    return options


def rendezvous_of(arguments: argparse.Namespace) -> Rendezvous | None:
    """The rendezvous options that were given; None for one machine.

    Raises:
        ConfigurationError: For values that do not go together.
    """
    from evener.runtime.rendezvous import Rendezvous

    given = {name: value for name in RENDEZVOUS if (value := getattr(arguments, name)) is not None}
    return Rendezvous(**given) if given else None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
