"""What users name as ``package.module:name`` (a task, a strategy, a balancer, an all-reduce), found in one way.

A name can fail in ways that have different cures: it is misspelt, there is no such module, the module cannot be
imported because something that *it* needs is missing or broken, it lacks the name, or the name is of another kind of
thing. Each is told apart, so that nobody looks for a typing error where a package is missing.
"""

from __future__ import annotations

import pkgutil
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from evener.core.config.strategy_names import here_words
from evener.core.did_you_mean import nearest
from evener.errors import ConfigurationError, EvenerError

GROUPS = {
    "task": "evener.tasks",
    "strategy": "evener.strategies",
    "all-reduce": "evener.all_reduces",
    "balancer": "evener.balancers",
}
"""The groups of entry points by which other packages give short names to things of their own."""


def installed(what: str) -> dict[str, str]:
    """The short names that other packages have given, with the ``package.module:name`` that each stands for.

    Raises:
        ConfigurationError: If two packages give one name to different things.
    """
    found: dict[str, str] = {}
    for point in entry_points(group=GROUPS[what]) if what in GROUPS else ():
        if found.setdefault(point.name, point.value) != point.value:
            raise ConfigurationError(
                f"{what} {point.name!r} is both {found[point.name]} and {point.value}, of two packages that are "
                "installed: name the one that is meant as package.module:name, or remove a package"
            )
    return found


def is_named(name: str, what: str, own: Iterable[str]) -> bool:
    """Whether ``name`` is one of another package or of the user's own, and none of Evener's ``own``."""
    return name not in own and (":" in name or name in installed(what))


def suggestion(name: str, known: Iterable[str]) -> str:
    """What may have been meant, as a sentence behind another one; empty if nothing is near."""
    path = Path(name)
    if path.suffix == ".py":
        return f". Did you mean {'.'.join(path.with_suffix('').parts)}:task?"
    near = nearest(name, known)
    return f". Did you mean {near}?" if near else ""


def find(
    name: str,
    what: str,
    kind: str,
    fits: Callable[[Any], bool],
    *,
    known: Iterable[str] = (),
    error: type[ConfigurationError] = ConfigurationError,
) -> Any:
    """What ``name`` stands for: an attribute of a module, also a nested one (``package.module:Class.method``).

    Args:
        name: ``package.module:name``.
        what: What it is to be, for messages: ``strategy``.
        kind: What it must be in Python, for messages: ``subclass of evener.strategies.base.Strategy``.
        fits: Whether a value is of that kind.
        known: Short names that there are besides, for messages.
        error: Of which class errors are.

    Raises:
        ConfigurationError: Of the class ``error``, if the name is malformed, there is no such module or no such name in
            it, the module cannot be imported (chained to the cause), or the value is not of the kind.
        EvenerError: As importing the module raised it.
    """
    others: Mapping[str, str] = {} if ":" in name else installed(what)
    name = others.get(name, name)
    module_name, colon, attribute = name.partition(":")
    if not (colon and _dotted(module_name) and _dotted(attribute)):
        raise error(_unknown(name, what, [*known, *others]))
    module = _module(module_name, f"{what} {name!r}", error)
    try:
        found = pkgutil.resolve_name(name)
    except AttributeError as cause:
        raise error(
            f"{what} {name!r}: module {module_name} has no {attribute}; {_candidates(module, kind, fits)}"
        ) from cause
    if not fits(found):
        raise error(
            f"{what} {name!r}: {attribute} of module {module_name} is {kind_of(found)}, not a {kind}; "
            f"{_candidates(module, kind, fits)}"
        )
    return found


def _dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _unknown(name: str, what: str, known: list[str]) -> str:
    short = ", ".join(known)
    ways = f"known are {short}, or name" if short else "name"
    here = here_words(name, what)
    near = "" if here else suggestion(name, known)
    return f"no {what} is called {name!r}{here}; {ways} your own package.module:name{near}"


def check_name(name: str, what: str, known: Iterable[str], error: type[ConfigurationError]) -> None:
    """Raises ``error`` for a short name that nobody has given. Imports nothing: a name with a colon is looked up later.

    Args:
        what: The kind of part that is named, such as ``strategy``.
        known: Evener's own short names of that kind.
    """
    if ":" not in name and name not in known and name not in (others := installed(what)):
        raise error(_unknown(name, what, [*known, *others]))


def _module(name: str, label: str, error: type[ConfigurationError]) -> ModuleType:
    try:
        module: ModuleType = pkgutil.resolve_name(f"{name}:")
    except EvenerError:
        raise
    except (Exception, SystemExit) as cause:
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise error(
                f"{label}: there is no module {cause.name!r} on the path of Python modules"
            ) from cause
        raise error(
            f"{label}: importing module {name} failed{_place(cause)} with {type(cause).__name__}: {cause}"
        ) from cause
    return module


def _place(error: BaseException) -> str:
    """Where in the user's files the error arose, unless it is of another place or none."""
    machinery = ("<frozen", pkgutil.__file__, __file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(machinery) and "importlib" not in frame.filename
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _candidates(module: ModuleType, kind: str, fits: Callable[[Any], bool]) -> str:
    """The names in the module that would have fitted; those it only imported are another module's."""
    names = sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and fits(value)
        and str(getattr(value, "__module__", "")).startswith(module.__name__)
    )
    return f"of this kind it has {', '.join(names)}" if names else f"it has no {kind}"


def kind_of(value: object) -> str:
    """What a value is, for messages: a class, ``None`` or of which type."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
