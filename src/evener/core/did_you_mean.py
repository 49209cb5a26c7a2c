"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most similar to ``name``, or a similar one that begins with it; empty if there is
    none."""
    similar = difflib.get_close_matches(name, list(known))
    return next((each for each in similar if each.startswith(name)), similar[0] if similar else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean X?" with the most similar known name; empty if none is similar."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else ""
