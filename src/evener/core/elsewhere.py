"""Maps the URL of a run directory elsewhere to a local directory, and back.

A run writes to its local directory as any other, and what it wrote is uploaded. The local directory has the URL as its
path, below a directory for each host, since several hosts may share a home::

    s3://bucket/run        ~/.cache/evener/elsewhere/HOST/s3:/bucket/run
    file:///mnt/disk/run   ~/.cache/evener/elsewhere/HOST/file:/%/mnt/disk/run

So paths within a run directory (``checkpoints/best``) are those within the URL, and code that handles paths need not
know of URLs.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from evener.errors import ConfigurationError

PLACES = ("run_dir", "resume", "weights")
"""Settings that may be URLs."""
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:")
_HOME = ("evener", "elsewhere")
_LOCAL = ("file", "local")
_NO_HOST = "%"
"""Stands for the empty first part of ``file:///mnt``; no host or bucket has this name."""


def is_url(text: str) -> bool:
    """Returns True if a text begins with a protocol, as ``s3://``."""
    return _URL.match(text) is not None


def local_path(url: str) -> Path:
    """Returns the local directory of a URL. It need not exist.

    Raises:
        ConfigurationError: If the URL cannot be that of a directory, or holds a password.
    """
    found = _URL.fullmatch(url)
    assert found is not None, url
    scheme, rest = found[1].lower(), found[2].rstrip("/")
    host, *parts = rest.split("/")
    strange = [part for part in parts if part in ("", ".", "..") or not part.isprintable()]
    if "?" in rest or "::" in rest or host in (".", "..", _NO_HOST) or strange or not (host or parts):
        raise ConfigurationError(f"{url!r} is no URL of a directory, as s3://bucket/run")
    if host and scheme in _LOCAL:  # which fsspec takes as a path below the working directory
        raise ConfigurationError(
            f"{url!r} has two slashes: give an absolute path, as {scheme}:///mnt/disk/run"
        )
    if ":" in host.rpartition("@")[0]:
        raise ConfigurationError(
            f"the URL {scheme}://...@{host.rpartition('@')[2]}/... holds a password, which would stand in the run's "
            "settings: leave it out, and give it as the protocol's package takes it, such as by the environment"
        )
    return _root().joinpath(f"{scheme}:", host or _NO_HOST, *parts)


def url_of(path: Path) -> str | None:
    """Returns the URL whose local directory is ``path``, or that holds it. None for other paths.

    The path alone tells, so that processes agree whose environment or host name differs.
    """
    parts = path.parts
    for place in range(len(parts) - 4):
        scheme, host, *inner = parts[place + 3 :]
        if parts[place : place + 2] == _HOME and _SCHEME.fullmatch(scheme):
            return f"{scheme}//{'/'.join(['' if host == _NO_HOST else host, *inner])}"
    return None


def shown(path: Path) -> str:
    """Returns the path as a user knows it: its URL, if it has one."""
    return url_of(path) or str(path)


def place_of(name: str, value: str | Path) -> Path:
    """Returns the path of a directory or file that a user names by a path or a URL.

    Raises:
        ConfigurationError: If it is neither, or a URL for a setting that is not in ``PLACES``.
    """
    if isinstance(value, str) and is_url(value):
        if name not in PLACES:
            raise ConfigurationError(f"{name} is {value!r}, and must be local")
        return local_path(value)
    path = Path(value)
    if len(path.parts) > 1 and _SCHEME.fullmatch(path.parts[0]) and not Path(path.parts[0]).exists():
        raise ConfigurationError(
            f"{name} is {str(path)!r}, a URL that has lost a slash in a path: give it as text"
        )
    return path


def host_name() -> str:
    """Returns the name of this host, by which its local directories are told from those of others."""
    return os.uname().nodename or "localhost"


def _root() -> Path:
    platformdirs: Any = importlib.import_module("platformdirs")  # not needed for `evener --help`
    cache: Path = platformdirs.user_cache_path(_HOME[0])
    return cache / _HOME[1] / host_name()
