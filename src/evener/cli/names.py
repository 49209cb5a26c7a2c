"""Checks short names on the command line before PyTorch is imported, since importing it takes seconds."""

from __future__ import annotations

import argparse

from evener.core.config.strategy_names import MEANINGS, check_axes
from evener.errors import ConfigurationError, ShareError, TaskError


def check_names(arguments: argparse.Namespace) -> None:
    """Checks task, strategies, all-reduce, balancer and the axes of a mesh, as far as the command has these options.

    Raises:
        ConfigurationError: If neither Evener nor an installed package defines a short name.
    """
    from evener.core.plugins import check_name

    takes_scripts = hasattr(arguments, "script_arguments")
    for name in _given(arguments, "task"):
        if takes_scripts and (arguments.module or name.endswith(".py")):
            continue
        check_name(name, "task", MEANINGS["task"], TaskError)
    for name in (_given(arguments, "strategy") or [""])[0].split(","):
        check_name(name or "auto", "strategy", MEANINGS["strategy"], ConfigurationError)
    for name in _given(arguments, "allreduce"):
        check_name(name, "all-reduce", MEANINGS["all-reduce"], ConfigurationError)
    for mesh in _given(arguments, "mesh"):
        check_axes(axis for axis, equals, _ in (part.partition("=") for part in mesh.split(",")) if equals)
    for name in _given(arguments, "balance"):
        if name[0].isalpha():
            check_name(name, "balancer", [*MEANINGS["balancer"], "weights such as 3,1"], ShareError)


def _given(arguments: argparse.Namespace, option: str) -> list[str]:
    """Returns the option's text in a list; empty if the option was not given or does not exist."""
    value = getattr(arguments, option, None)
    return [value] if isinstance(value, str) and value else []
