"""Cards and links by name, from ``catalogue.toml``, and the units in which people write latency and bandwidth.

The catalogue is data: it has a maker's figure beside each name, with its source.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from typing import Any

from evener.core.config.sizes import parse_size
from evener.core.did_you_mean import did_you_mean
from evener.errors import ConfigurationError
from evener.files import PACKAGE, read_text

_MAKER = re.compile(r"^(nvidia|geforce|tesla|amd|instinct)+")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)")
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?\s*(?:[kKMGT]i?)?)(B|bit)/s")


@cache
def read_catalogue() -> dict[str, Any]:
    """Returns the whole catalogue: its tables ``cards``, ``links``, ``workspace`` and ``bare``."""
    return tomllib.loads(read_text(PACKAGE / "tools/plan/catalogue.toml"))


@cache
def _index(table: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns name and entry of everything in a table, by every name that it has, without case and spaces."""
    entries = read_catalogue()[table].items()
    return {_plain(each): (name, entry) for name, entry in entries for each in (name, *entry.get("also", ()))}


def _plain(name: str) -> str:
    return _MAKER.sub("", re.sub(r"[^a-z0-9]", "", name.casefold()))


def find_entry(table: str, name: str) -> tuple[str, dict[str, Any]]:
    """Returns name and entry of a card or a link in the catalogue; the entry is empty if it has none of that name.

    Args:
        table: ``cards`` or ``links``.
        name: Any name of it, as people write it or as torch reports it.
    """
    return _index(table).get(_plain(name), (name, {}))


def names_like(table: str, name: str) -> str:
    """Returns what to say of a name that the catalogue does not have: names that are near, or all that there are."""
    known = list(read_catalogue()[table])
    begin = [each for each in known if _plain(name) and _plain(each).startswith(_plain(name))]
    near = f"did you mean {' or '.join(begin)}?" if begin else did_you_mean(name, known)
    return near or f"the catalogue has {', '.join(known)}"


def parse_latency(text: str) -> float:
    """Parses a duration, such as ``5 us``, and returns seconds.

    Raises:
        ConfigurationError: If ``text`` is no number with one of the units ns, us, ms and s.
    """
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{text!r} is no latency: write a number with a unit, such as 5 us or 0.1 ms"
        )
    return float(match[1]) * _SECONDS[match[2]]


def parse_bandwidth(text: str) -> float:
    """Parses a bandwidth in bytes or bits, such as ``12.5 GB/s`` or ``100 Gbit/s``, and returns bytes per second.

    ``Gb/s`` is refused, because some mean bits by it and some bytes.

    Raises:
        ConfigurationError: If ``text`` is no number with such a unit.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{text!r} is no bandwidth: write a number with a unit, such as 12.5 GB/s or 100 Gbit/s"
        )
    return parse_size(f"{match[1]}B") / (8 if match[2] == "bit" else 1)
