"""How a battery says that a promise is broken."""

from __future__ import annotations

from evener.errors import EvenerError


class ConformanceError(EvenerError, AssertionError):
    """A part breaks a promise of its interface; says which, and on what input."""


def broken(name: str, promise: str, seen: str) -> ConformanceError:
    """The error for the part ``name``."""
    return ConformanceError(f"{name} breaks its promise: {promise}. {seen}")
