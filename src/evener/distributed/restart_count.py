"""Number of the start (restart) of the ranks that this process takes part in.

Keys in the shared store include this number, so that ranks find no keys of an earlier start. torchrun's agent counts
the starts. A rank that stays while another is replaced takes part in several starts. Its names are numbered anew in
each, because the new rank begins at 0.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict

START = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of the start."""
_counts: defaultdict[tuple[int, str], itertools.count[int]] = defaultdict(itertools.count)


def generation() -> int:
    """Returns the number of the current start; 0 for the first."""
    return int(os.environ.get(START, "0"))


def advance_to(number: int) -> None:
    """Sets the number of the current start."""
    os.environ[START] = str(number)


def next_name(what: str) -> str:
    """Returns ``what/START/N`` with a running number N. It agrees on all ranks if they make the same calls in order."""
    start = generation()
    return f"{what}/{start}/{next(_counts[start, what])}"
