"""Imports user-defined parts (tasks, strategies, balancers, all-reduces) by the name ``package.module:name``.

A lookup can fail for several reasons, which have different remedies: the name is misspelt, there is no such module, the
module cannot be imported because one of its own dependencies is missing or broken, it lacks the name, or the name is an
object of the wrong kind. Each reason has its own message.
"""

from __future__ import annotations

import pkgutil
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from evener.core.config.strategy_names import hint_of_local_name
from evener.core.did_you_mean import nearest
from evener.errors import ConfigurationError, EvenerError

GROUPS = {
    "task": "evener.tasks",
    "strategy": "evener.strategies",
    "all-reduce": "evener.all_reduces",
    "balancer": "evener.balancers",
}
"""Entry point groups with which other packages register short names for their own parts."""


def installed(what: str) -> dict[str, str]:
    """Returns the short names that other packages have registered, each with its ``package.module:name``.

    Raises:
        ConfigurationError: If two packages register the same name for different objects.
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
    """Returns True if ``name`` is from another package or user code, and is not one of Evener's ``own`` names.

    A text without letters, such as the weights ``3,1``, is no name, and is not looked for in all installed packages.
    """
    return name not in own and (":" in name or (any(map(str.isalpha, name)) and name in installed(what)))


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns a sentence "Did you mean X?" to append to a message; empty if no known name is similar."""
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
    """Imports the object called ``name``: an attribute of a module, also nested (``package.module:Class.method``).

    Args:
        name: ``package.module:name``, or a short name that another package has registered.
        what: The kind of part, for messages, such as ``strategy``.
        kind: The required kind of Python object, for messages: ``subclass of evener.strategies.base.Strategy``.
        fits: Returns True if an object is of this kind.
        known: Other valid short names, for messages.
        error: The class of the errors to raise.

    Raises:
        ConfigurationError: Of the class ``error``, if the name is malformed, there is no such module or no such name in
            it, the module cannot be imported (chained to the cause), or the object is not of the required kind.
        EvenerError: If importing the module raises it.
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
            f"{_hidden(module)}"
        ) from cause
    if not fits(found):
        raise error(
            f"{what} {name!r}: {attribute} of module {module_name} is {kind_of(found)}, not a {kind}; "
            f"{_candidates(module, kind, fits)}{_hidden(module)}"
        )
    return found


def _dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _unknown(name: str, what: str, known: list[str]) -> str:
    short = ", ".join(known)
    ways = f"known are {short}, or name" if short else "name"
    here = hint_of_local_name(name, what)
    near = "" if here else suggestion(name, known)
    return f"no {what} is called {name!r}{here}; {ways} your own package.module:name{near}"


def check_name(name: str, what: str, known: Iterable[str], error: type[ConfigurationError]) -> None:
    """Raises ``error`` for an unknown short name. Imports nothing: a name with a colon is looked up later.

    Args:
        what: The kind of part, such as ``strategy``.
        known: Evener's own short names for parts of this kind.
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
    """Returns the file and line at which importing failed; empty if there is none outside of the import system."""
    machinery = ("<frozen", pkgutil.__file__, __file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(machinery) and "importlib" not in frame.filename
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _candidates(module: ModuleType, kind: str, fits: Callable[[Any], bool]) -> str:
    """Lists the names of suitable objects that the module defines; names that it imports are left out."""
    names = sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and fits(value)
        and str(getattr(value, "__module__", "")).startswith(module.__name__)
    )
    return f"of this kind it has {', '.join(names)}" if names else f"it has no {kind}"


def _hidden(module: ModuleType) -> str:
    """Returns a sentence if the working directory has a module of this name too, which Python does not find, because it
    has imported another before; else empty."""
    place = Path(*module.__name__.split("."))
    known = getattr(module, "__file__", None)
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file() and not (known is not None and Path(known).exists() and path.samefile(known)):
            other = "that is built into Python" if known is None else f"in {known}"
            return f". {path} in the working directory is hidden by the module of the same name {other}: rename yours"
    return ""


def kind_of(value: object) -> str:
    """Describes a value for messages: ``None``, the class, or the type of an object."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
