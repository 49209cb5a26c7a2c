"""What a run is: its settings, the facts of its summary in words, and the command that reproduces it."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from evener.core.config.run_config import RunConfig
from evener.core.text import shortened

_LONGEST = 2000
_MOST_ENTRIES = 500
_PLACES = ("run_dir", "resume", "overwrite", "weights", "processes", "profile", "report", "metrics_file")
"""Settings that say where a run is, and not what it computes."""
_NOTES = (
    "precision",
    "recompute",
    "offload",
    "optimizer",
    "optimizer_state",
    "cuda_graphs",
    "exact",
    "batch_norm",
    "updates",
    "emulation",
    "average",
    "profile",
    "reading",
)
"""Fields of the summary that are sentences."""


def some_text(value: Any, longest: int = _LONGEST) -> str:
    """Returns a text of a file, shortened; empty for anything else."""
    return shortened(value, longest) if isinstance(value, str) else ""


def text_table(value: Any) -> dict[str, str]:
    """Returns a table of short texts; empty for anything else."""
    found = list(value.items())[:_MOST_ENTRIES] if isinstance(value, dict) else []
    return {some_text(name, 200): some_text(entry, 200) for name, entry in found}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with values that are numbers, texts, or short lists of such; others are written as text."""
    return {some_text(name, 200): _plain(value) for name, value in list(settings.items())[:_MOST_ENTRIES]}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value[:_MOST_ENTRIES]]
    if value is None or isinstance(value, bool | float) or (type(value) is int and abs(value) < 1 << 60):
        return value
    return shortened(str(value), _LONGEST)


def described_notes(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the sentences of a summary that describe how the run computed."""
    found = [some_text(summary.get(name)) for name in _NOTES]
    graphs = summary.get("graphs")
    if isinstance(graphs, list) and graphs and all(type(each) is int for each in graphs):
        found.append(f"compiled {max(graphs)} graphs on a rank")
    return tuple(line for text in found for line in text.splitlines())


def reproducing_command(settings: Mapping[str, Any], task: Mapping[str, Any], world_size: int) -> str:
    """Returns the command that trains the same again; empty if the task has no name, as in a script."""
    if isinstance(settings.get("command"), str):
        return some_text(settings["command"])
    name, options = task.get("task"), task.get("options")
    if not isinstance(name, str):
        return ""
    words = ["evener", "train", name]
    for key, value in options.items() if isinstance(options, dict) else ():
        words += ["--option", f"{key}={_option_text(value)}"]
    words += ["--processes", str(world_size), *_flags(settings)]
    return some_text(shlex.join(words))


def _option_text(value: Any) -> str:
    """Returns a value as an option has it: text in quotes if it would be read as something else, such as a number."""
    if not isinstance(value, str):
        return str(value)
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return repr(value)


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options of the settings that differ from the defaults."""
    for name, default in RunConfig().as_dict().items():
        value = settings.get(name)
        if name in _PLACES or value is None or value == default:
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        else:
            for each in value if isinstance(value, list) else [value]:
                yield from (flag, str(each))
