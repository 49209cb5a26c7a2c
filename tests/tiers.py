"""Which of many alike cases run with every ``make test``, with ``make test-slow``, and with ``make test-nightly`` only.

Crossed products grow faster than what they find: every row and every column of a table is met by each tier, and all
cells only by all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

ALWAYS: tuple[pytest.MarkDecorator, ...] = ()
SLOW = (pytest.mark.slow,)
NIGHTLY = (pytest.mark.nightly,)

Tier = Sequence[pytest.MarkDecorator]
_PARAMETERS = type(pytest.param())


def spread(cases: Iterable[Any], *tiers: Tier) -> list[Any]:
    """The cases of a test, dealt to ``tiers`` in turn; a tuple is a case of several arguments.

    Cases that are parameters already keep their names and marks.
    """
    return [_in_tier(case, tiers[place % len(tiers)]) for place, case in enumerate(cases)]


def _in_tier(case: Any, tier: Tier) -> Any:
    if isinstance(case, _PARAMETERS):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, *tier])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=tier)


def crossed(
    rows: Iterable[Any], columns: Sequence[Any], tiers_of: Callable[[Any], Sequence[Tier]]
) -> list[Any]:
    """All cells of a table, dealt along its diagonals to the tiers of their row."""
    return [
        pytest.param(row, column, id=f"{row}-{column}", marks=tiers[(place + other) % len(tiers)])
        for place, row in enumerate(rows)
        for tiers in [tiers_of(row)]
        for other, column in enumerate(columns)
    ]
