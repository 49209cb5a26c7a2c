"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most similar to ``name``; empty if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean X?" with the most similar known name; empty if none is similar."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else ""
