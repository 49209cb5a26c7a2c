"""Which start of its ranks a process takes part in.

What ranks name in a store that they share begins with the number of the start, so that nothing of an earlier one is
found there. torchrun's agent counts the starts. A rank that stays while another is replaced takes part in several:
names are counted anew in each, for the newcomer has counted none.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict

_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_counts: defaultdict[tuple[int, str], itertools.count[int]] = defaultdict(itertools.count)


def generation() -> int:
    """0 for the first start."""
    return int(os.environ.get(_VARIABLE, "0"))


def advance_to(number: int) -> None:
    """This process takes part in start ``number`` from now on."""
    os.environ[_VARIABLE] = str(number)


def next_name(what: str) -> str:
    """``what/START/N``: as many on every rank, if all make the same ones in the same order."""
    start = generation()
    return f"{what}/{start}/{next(_counts[start, what])}"
