"""The states of a torchmetrics metric, its own exchange between ranks left out: ``_enable_compute_groups``,
``_groups_checked``, ``_to_sync``, ``_defaults``, ``_reductions``, ``_update_count`` and ``_computed``.

Its exchange gathers at moments of its own, and hangs when a rank has no data; a way to merge states that were
gathered otherwise is not public.

Tested with torchmetrics 1.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_collection(part: Any) -> bool:
    """Tells whether it collects metrics, some of which may share a state."""
    return hasattr(part, "_enable_compute_groups")


def has_states(part: Any) -> bool:
    """Tells whether it is a metric with states of its own."""
    return hasattr(part, "_defaults") and hasattr(part, "_reductions")


def keep_apart(collection: Any) -> None:
    """Has each metric keep a state of its own."""
    collection._enable_compute_groups = False
    collection._groups_checked = False


def keep_to_rank(part: Any) -> None:
    """Keeps the metric from exchanging anything by itself."""
    part.sync_on_compute = part.dist_sync_on_step = part._to_sync = False


def states(part: Any) -> dict[str, Any]:
    """Returns the states by name."""
    return {name: getattr(part, name) for name in part._defaults}


def reductions(part: Any) -> Mapping[str, Any]:
    """Tells, by name of the state, how those of several ranks become one."""
    found: Mapping[str, Any] = part._reductions
    return found


def updates(part: Any) -> int:
    """Counts how often it was given data."""
    return int(part._update_count)


def set_states(part: Any, merged: Mapping[str, Any], count: int) -> None:
    """Gives the metric the states that came of ``count`` updates."""
    for name, value in merged.items():
        setattr(part, name, value)
    part._update_count, part._computed = count, None
