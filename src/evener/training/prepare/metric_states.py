"""Metrics of torchmetrics in a prepared loop, which add up the states of all ranks when they compute.

That is right for a metric that each rank has updated with its own samples. One that was updated with rows of
``evener.gather`` has all samples on every rank, and would count each once for each rank.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any
from unittest.mock import patch

from evener.data.fingerprint import digest_if_any
from evener.torch_internals.torchmetrics_states import states, updates
from evener.training.prepare.loop_state import LoopState

_WHOLE = (
    "the metric {name} has the same state on all ranks, so it has all samples, and the ranks' states are not added up. "
    "Make it with sync_on_compute=False, which says so"
)
_PLACEHOLDER = (
    "the metric {name} was updated on each rank with its own samples, and a rank had none of a batch: it computed a "
    "sample that counts for nothing, and the metric may have counted it. Update the metric with the rows that "
    "evener.gather gives, and make it with sync_on_compute=False"
)


class SharedMetrics:
    """Lets metrics of torchmetrics leave out the sum over ranks if they have all samples, until it is closed.

    Warns of that, and of placeholders that were counted, when a metric computes.
    """

    def __init__(self, place: LoopState) -> None:
        self._place, self._patched = place, None
        base = getattr(sys.modules.get("torchmetrics"), "Metric", None)
        if base is None or place.world_size == 1:
            return
        synchronize = base.sync

        def sync(metric: Any, *args: Any, should_sync: bool = True, **kwargs: Any) -> None:
            if not (should_sync and updates(metric) and self._is_whole(metric)):
                synchronize(metric, *args, should_sync=should_sync, **kwargs)

        self._patched = patch.object(base, "sync", sync)
        self._patched.start()

    def _is_whole(self, metric: Any) -> bool:
        """Returns True if all ranks have the same state, of gathered rows or of the same samples. A collective call."""
        has_all = self._place.gathered >= updates(metric) or self._place.data.degree == 1
        own = digest_if_any(states(metric)), has_all
        found = self._place.session.control.gather_objects(own)
        is_whole = all(each == found[0] and all(each) for each in found)
        if (is_whole or self._place.had_placeholders) and not self._place.rank:
            text = _WHOLE if is_whole else _PLACEHOLDER
            warnings.warn(text.format(name=type(metric).__name__), stacklevel=6)
        return is_whole

    def close(self) -> None:
        """Leaves metrics as they were."""
        if self._patched is not None:
            self._patched.stop()
