"""What may have been meant by a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like it; empty if none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest of the known names; empty if none is near."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else ""
