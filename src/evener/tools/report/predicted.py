"""Compares a run with what ``evener plan`` predicted for it."""

from __future__ import annotations

from pathlib import Path

from evener.tools.plan.calibration import Calibration
from evener.tools.plan.comparison import compared_step
from evener.tools.report.schema import PredictedTerm, Prediction
from evener.tools.report.step_series import rounded


def prediction_of(calibration: Path | None, run: Path) -> Prediction | None:
    """Returns the predicted step beside the measured one. None without a calibration.

    Raises:
        ConfigurationError: If the calibration does not have the way in which the run has trained.
        DataError: If the run has too few steps, or has not ended.
    """
    if calibration is None:
        return None
    found = compared_step(Calibration.read(calibration), run)
    terms = [
        PredictedTerm(name, rounded(found.predicted.terms[name]), rounded(took))
        for name, took in found.terms.items()
    ]
    whole = PredictedTerm("step", rounded(found.predicted.seconds), rounded(found.seconds))
    low, high = (rounded(found.predicted.quantile(part)) for part in (0.05, 0.95))
    return Prediction(found.words(), low, high, (*terms, whole))
