"""The states of a torchmetrics metric, without its own synchronization between ranks: ``_enable_compute_groups``,
``_groups_checked``, ``_to_sync``, ``_defaults``, ``_reductions``, ``_update_count`` and ``_computed``.

The synchronization of torchmetrics gathers at times that it chooses, and hangs if a rank has no data. There is no
public way to merge states that were gathered in another way.

Tested with torchmetrics 1.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_collection(part: Any) -> bool:
    """Returns True if ``part`` is a collection of metrics, some of which may share a state."""
    return hasattr(part, "_enable_compute_groups")


def has_states(part: Any) -> bool:
    """Returns True if ``part`` is a metric with states."""
    return hasattr(part, "_defaults") and hasattr(part, "_reductions")


def keep_apart(collection: Any) -> None:
    """Makes each metric of the collection keep its own state."""
    collection._enable_compute_groups = False
    collection._groups_checked = False


def keep_to_rank(part: Any) -> None:
    """Turns off the metric's own synchronization between ranks."""
    part.sync_on_compute = part.dist_sync_on_step = part._to_sync = False


def states(part: Any) -> dict[str, Any]:
    """Returns the states of a metric by name."""
    return {name: getattr(part, name) for name in part._defaults}


def reductions(part: Any) -> Mapping[str, Any]:
    """Returns, by name of the state, the function that merges the states of several ranks, or None."""
    found: Mapping[str, Any] = part._reductions
    return found


def updates(part: Any) -> int:
    """Returns the number of updates of the metric."""
    return int(part._update_count)


def set_states(part: Any, merged: Mapping[str, Any], count: int) -> None:
    """Sets the states of the metric to ``merged``, and its number of updates to ``count``."""
    for name, value in merged.items():
        setattr(part, name, value)
    part._update_count, part._computed = count, None
