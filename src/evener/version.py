"""Which Evener this is, for those who tell of it without PyTorch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def evener_version() -> str:
    """The version of Evener that this process runs."""
    try:
        return version("evener")
    except PackageNotFoundError:  # from a checkout that was not installed
        return "of a checkout"
