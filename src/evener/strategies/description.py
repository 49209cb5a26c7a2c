"""Describes a learner in the records of a run."""

from __future__ import annotations

from typing import TypedDict

from evener.components.optim import eight_bit, fused
from evener.strategies import exact_bits
from evener.strategies.learner import Learner
from evener.strategies.steppers.grain_by_grain import audit_words
from evener.strategies.steppers.optimizer_in_backward import updates_of
from evener.strategies.sync_batch_norm import words_of_normalization


class LearnerRecord(TypedDict):
    """The fields of :class:`~evener.core.records.RunSummary` that a learner knows."""

    strategy: str
    allreduce: str
    merging: str
    precision: str
    optimizer: str
    optimizer_state: str
    exact: str
    batch_norm: str
    updates: str
    emulation: str


def describe(learner: Learner) -> LearnerRecord:
    """Returns what the records say about a learner now. A text is empty if there is nothing to say."""
    settings, optimizer, updates = learner.settings, learner.optimizer, learner.whole_updates
    return {
        "strategy": learner.name,
        "allreduce": learner.synchronizer.words,
        "merging": learner.replicas.words if learner.replicas else "",
        "precision": settings.precision.words,
        "optimizer": fused.words_of(optimizer) if updates is None else updates.words,
        "optimizer_state": eight_bit.words_of(optimizer),
        "exact": exact_bits.words_of(settings.bits, learner.session.device) + audit_words(learner.stepper),
        "batch_norm": words_of_normalization(learner),
        "updates": updates_of(learner),
        "emulation": settings.throttle.words if settings.throttle else "",
    }
